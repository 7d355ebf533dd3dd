"""``torchtitan-rl sft CONFIG [options]``: fine-tunes a policy on conversations from files.

Its run is that of ``torchtitan-rl train`` without rollouts, with the same exit codes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.commands.train import run_trainer
from torchtitan_rl.commands.view import PAGE_HELP
from torchtitan_rl.config.loader import load_supervised, ready_configs
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.config.supervised import SftConfig
from torchtitan_rl.observability.console import SUPERVISED_WORDS

_HELP = f"""\
usage: torchtitan-rl sft CONFIG [options]

CONFIG is a Python file with an SftConfig named config, or one of
{chr(10).join(f"  {name}" for name in ready_configs("sft"))}
Options: every field of the configuration, listed by torchtitan-rl sft CONFIG --help
  --dry-run         check everything and print the plan, start nothing
  --dry-run --json  the plan and all fields of the configuration as JSON
{PAGE_HELP}
{SUPERVISED_WORDS}"""


def main(words: Sequence[str]) -> int:
    """``torchtitan-rl sft WORDS``; returns the exit code.

    Raises:
        ConfigError: the run cannot start as it is configured.
    """
    return run_trainer(words, command="sft", usage=_HELP, load=_load)


def _load(path: Path, overrides: Sequence[str]) -> RunConfig:
    return load_supervised(path, overrides, kind=SftConfig, command="sft").run()
