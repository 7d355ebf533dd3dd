"""``torchtitan-rl data preview CONFIG [options]``: the problems of a task as the policy sees them.

Starts no engine. Exit codes: 0 the problems were shown; 2 the configuration, a file or a row is
invalid, and one line on stderr says what is wrong.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from typing import Any

from torchtitan_rl.agents.task import AgentTask
from torchtitan_rl.bounds import check_fields
from torchtitan_rl.config.loader import load_config, parse_options, split_config, take_options
from torchtitan_rl.config.model import find_policy
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.environments.mcp import sharing_servers
from torchtitan_rl.errors import ConfigError, TorchtitanRLError
from torchtitan_rl.rollout.rendering import load_tokenizer
from torchtitan_rl.rollout.task import Split
from torchtitan_rl.types import Problem

_PROG = "torchtitan-rl data preview"
_SHOWN_CHARS = 2000


@dataclass(frozen=True, kw_only=True)
class PreviewConfig:
    """Show the problems of a configuration's task as the policy sees them. All further options,
    such as ``--task.prompt "{text}"``, change the configuration."""

    count: int = 3
    """Number of problems to show."""
    split: Split = "train"
    """Which problems: ``train`` or ``validation``."""
    all: bool = False
    """Read the whole epoch: count its problems, and find every row that cannot be used."""


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & set(words):
        parse_options(PreviewConfig, ["--help"], prog=f"{_PROG} CONFIG")
    config_file, options = split_config(words, prog=_PROG)
    given, rest = take_options(options, ("--count", "--split"))
    own = [word for option in given.items() for word in option]
    own += [word for word in rest if word == "--all"]
    others = [word for word in rest if word != "--all"]
    preview = parse_options(PreviewConfig, own, prog=f"{_PROG} CONFIG")
    config = load_config(config_file, others)
    try:
        asyncio.run(_show(config, preview))
    except ConfigError:
        raise
    except TorchtitanRLError as error:
        raise ConfigError(str(error)) from error
    return 0


async def _show(config: RunConfig, preview: PreviewConfig) -> None:
    check_fields(config)
    if errors := config.task.errors():
        raise ConfigError(errors)
    config = replace(config, task=sharing_servers(config.task))
    tokenizer = None
    if not isinstance(config.task, AgentTask):
        tokenizer = load_tokenizer(find_policy(config.policy.checkpoint)[0])
    source = config.task.dataset(preview.split, seed=config.seed)
    for problem in islice(_epoch(source), max(0, preview.count)):
        print(f"=== {problem.problem_id}")
        print(json.dumps(dict(problem.data), ensure_ascii=False, default=str)[:_SHOWN_CHARS])
        if tokenizer is not None:
            prompt = await _prompt(config, problem, tokenizer)
            print(f"--- prompt, {len(prompt)} tokens")
            print(tokenizer.decode(list(prompt)))
    if preview.all:
        await _show_epoch(config, preview.split, tokenizer)


async def _show_epoch(config: RunConfig, split: Split, tokenizer: Any) -> None:
    source = config.task.dataset(split, seed=config.seed)
    parts: Counter[str] = Counter()
    lengths: list[int] = []
    ids: set[str] = set()
    for problem in _epoch(source):
        if problem.problem_id in ids:  # the dataset starts again without counting epochs
            break
        ids.add(problem.problem_id)
        parts[problem.task] += 1
        if tokenizer is not None:
            lengths.append(len(await _prompt(config, problem, tokenizer)))
    named = ", ".join(f"{count} {part}" for part, count in parts.items() if part)
    print(f"=== {len(ids)} {split} problems{f' ({named})' if named else ''}")
    if lengths:
        room = config.rollout.max_total_tokens
        too_long = sum(length >= room for length in lengths)
        print(
            f"prompts of {min(lengths)} to {max(lengths)} tokens, median {median(lengths):g}; "
            f"{too_long} leave no room in rollout.max_total_tokens ({room})"
        )


def _epoch(source: Any) -> Iterator[Problem]:
    """Yield the problems of the first epoch."""
    with suppress(StopIteration):
        while True:
            problem = source.next()
            if source.epoch > 0:
                return
            yield problem


async def _prompt(config: RunConfig, problem: Problem, tokenizer: Any) -> tuple[int, ...]:
    env = config.task.environment(problem, tokenizer=tokenizer, limits=config.rollout)
    try:
        return (await env.reset()).prompt_token_ids
    finally:
        await env.close()
