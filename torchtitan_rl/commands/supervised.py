"""``torchtitan-rl sft CONFIG [options]`` trains a policy on conversations from files,
``torchtitan-rl dpo CONFIG [options]`` on pairs of answers.

Their runs are those of ``torchtitan-rl train`` without rollouts, with the same exit codes."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_rl.commands.train import run_trainer
from torchtitan_rl.commands.view import PAGE_HELP
from torchtitan_rl.config.loader import load_supervised, ready_configs
from torchtitan_rl.config.supervised import DpoConfig, SftConfig
from torchtitan_rl.observability.console import SUPERVISED_WORDS


def sft(words: Sequence[str]) -> int:
    return _run(words, "sft", "an SftConfig", SftConfig)


def dpo(words: Sequence[str]) -> int:
    return _run(words, "dpo", "a DpoConfig", DpoConfig)


def _run(
    words: Sequence[str], command: str, what: str, kind: type[SftConfig] | type[DpoConfig]
) -> int:
    usage = f"""\
usage: torchtitan-rl {command} CONFIG [options]

CONFIG is a Python file with {what} named config, or one of
{chr(10).join(f"  {name}" for name in ready_configs(command))}
Options: every field of the configuration, listed by torchtitan-rl {command} CONFIG --help
  --dry-run         check everything and print the plan, start nothing
  --dry-run --json  the plan and all fields of the configuration as JSON
{PAGE_HELP}
{SUPERVISED_WORDS}"""
    return run_trainer(
        words,
        command=command,
        usage=usage,
        load=lambda path, overrides: load_supervised(
            path, overrides, kind=kind, command=command
        ).run(),
    )
