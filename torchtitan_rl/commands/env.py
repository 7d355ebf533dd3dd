"""``torchtitan-rl env check CONFIG [options]``: shows a few rollouts of a task turn by turn, and
reports mistakes in its environment.

Exit codes: 0 no mistake was found; 1 mistakes were found, each shown with its fix; 2 the
configuration is wrong; 128 + n ended by signal n.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import EnumChoicesFromValues, Positional, arg

from torchtitan_rl.agents.task import AgentTask, environment_factory
from torchtitan_rl.audit.env import CheckedProblem, EnvChecker, ScriptedPolicy, settled
from torchtitan_rl.audit.findings import Finding, Mistake, Watched, describe_rollout
from torchtitan_rl.bounds import Positive, PositiveFloat, check_fields
from torchtitan_rl.commands.console import StopSignals, run_command
from torchtitan_rl.commands.replicas import Replicas
from torchtitan_rl.config.evaluate import prepare_generation
from torchtitan_rl.config.loader import load_config, parse_options, split_options
from torchtitan_rl.config.model import read_architecture
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.config.problems import evaluation_problems, find_problems
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.rollout.rendering import load_tokenizer
from torchtitan_rl.rollout.run import EnvironmentFactory
from torchtitan_rl.rollout.task import Split
from torchtitan_rl.types import Problem


@dataclass(frozen=True, kw_only=True)
class EnvCheckConfig:
    """Roll out a few problems of a configuration's task, show them turn by turn, and report common
    mistakes with their fixes. Options with a dot (``--task.digits 3``) change the configuration."""

    config: Annotated[Positional[str], arg(metavar="CONFIG")]
    """A configuration file, or the name of a ready configuration."""
    policy: Literal["scripted", "real"] = "scripted"
    """``scripted`` answers with ``say`` and starts no process; ``real`` is the configuration's
    policy on a replica."""
    say: tuple[str, ...] = ("I do not know.",)
    """Answers of the scripted policy, one for each turn; the first one follows the last one."""
    problems: Positive = 3
    """Number of problems, the first ones of the split. Each is rolled out twice."""
    split: Split = "train"
    """Which problems to use: ``train`` or ``validation``."""
    max_block_ms: PositiveFloat = 250.0
    """Maximum time that a call of the environment may block the event loop, in milliseconds."""
    allow: EnumChoicesFromValues[tuple[Mistake, ...]] = ()
    """Findings that are intended and do not count as errors."""


def main(words: Sequence[str]) -> int:
    own, others = split_options(words)
    options = parse_options(EnvCheckConfig, own, prog="torchtitan-rl env check")
    return _check(options, load_config(Path(options.config), others))


def _check(options: EnvCheckConfig, config: RunConfig) -> int:
    is_scripted = options.policy == "scripted"
    if is_scripted and isinstance(config.task, AgentTask):
        raise ConfigError("--policy is scripted: agents ask an endpoint; give --policy real")
    check_fields(options, "--")
    if not options.say:
        raise ConfigError("--say is empty: give a text")
    run = config
    evaluation = replace(config.evaluation, num_problems=options.problems)
    config = replace(
        config,
        evaluation=evaluation,
        generator=replace(config.generator, replicas=1),
        output_dir=Path("outputs/env_check"),
    )
    prepared = prepare_generation(config, num_rollouts=2)
    _, errors = find_problems(run)
    if errors:  # `train` would refuse these, too
        raise ConfigError(errors)
    problems = evaluation_problems(config, options.split, option="--problems")
    if is_scripted:
        return asyncio.run(_with_script(options, prepared, problems))
    config.log_dir.mkdir(parents=True, exist_ok=True)
    return run_command(partial(_with_replica, options, prepared, problems), log_dir=config.log_dir)


async def _with_script(
    options: EnvCheckConfig, prepared: PreparedRun, problems: Sequence[Problem]
) -> int:
    tokenizer, config = load_tokenizer(prepared.policy_dir), prepared.config
    environment = environment_factory(
        config.task, tokenizer=tokenizer, limits=config.rollout, host=None
    )
    return await _show(_checker(options, prepared, tokenizer, environment), problems, options)


async def _with_replica(
    options: EnvCheckConfig, prepared: PreparedRun, problems: Sequence[Problem], _: StopSignals
) -> int:
    async with Replicas(prepared) as replicas:
        found = await replicas.use(prepared.policy_dir)
        checker = _checker(options, prepared, found.tokenizer, found.environment())
        checker = replace(checker, generate=found.router.generate)
        return await found.run(_show(checker, problems, options))


def _checker(
    options: EnvCheckConfig, prepared: PreparedRun, tokenizer: Any, environment: EnvironmentFactory
) -> EnvChecker:
    config, vocab_size = prepared.config, read_architecture(prepared.policy_dir).vocab_size
    scripted = ScriptedPolicy(tokenizer, options.say, vocab_size=vocab_size)
    return EnvChecker(
        environment=environment,
        limits=config.rollout,
        rubric=config.task.rubric(),
        generate=scripted,
        scripted=scripted,
        decode=lambda tokens: tokenizer.decode(list(tokens)),
        seed=config.seed,
        max_block_s=options.max_block_ms / 1000,
    )


async def _show(checker: EnvChecker, problems: Sequence[Problem], options: EnvCheckConfig) -> int:
    checked: list[CheckedProblem] = []
    for problem in problems:
        checked.append(one := await checker.check(problem, is_first=not checked))
        for line in describe_rollout(one.rollout, one.watched, checker.decode):
            print(line, flush=True)
        if any(finding.mistake is Mistake.TIMEOUT for finding in one.findings):
            break  # the other problems would also time out
    if checked and (watched := checked[-1].watched) is not None:
        print(_resumes(watched))
    findings, notes = settled(checked)
    for note in notes:
        print(f"note: {note}")
    return _conclude(findings, options.allow)


def _resumes(watched: Watched) -> str:
    if watched.is_stateful:
        return "resumed runs: rollouts continue from their saved states"
    if watched.replays:
        return "resumed runs: rollouts are replayed"
    return (
        "resumed runs: rollouts start again; with state_dict and load_state_dict, or replays = "
        "True, they continue"
    )


def _conclude(findings: Sequence[Finding], allowed: Sequence[Mistake]) -> int:
    kinds: dict[Mistake, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.mistake, []).append(finding)
    for mistake, found in kinds.items():
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        if mistake in allowed:
            print(f"allowed: {mistake.value}: {found[0].what}{more}")
            continue
        print(
            f"error: {mistake.value}: {found[0].rollout_id}: {found[0].what}{more}", file=sys.stderr
        )
        print(f"  mend: {found[0].mend}", file=sys.stderr)
    if kinds.keys() <= set(allowed):
        print("nothing wrong was found")
        return 0
    return 1
