"""``torchtitan-rl replay RUN_DIR --step K``: computes the update of step K again, from the recorded
rollouts of a run.

The trainer starts from the newest checkpoint before the step (or from the initial policy), takes
the steps between, and then step K. On the same machine and parallel layout the weights are equal
bit for bit. Exit codes: 0 the weights are equal; 1 they differ, or the replay failed; 2 there is
nothing to replay; 128 + n ended by signal n.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.bounds import Count, OptionalName, check_fields
from torchtitan_rl.commands.console import StopSignals, run_command
from torchtitan_rl.commands.train_only import batcher_of
from torchtitan_rl.config.checks import loss_errors, pair_errors
from torchtitan_rl.config.loader import parse_options, take_options
from torchtitan_rl.config.machine import machine_facts
from torchtitan_rl.config.plan import plan_processes
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.config.run import File, output_file_errors
from torchtitan_rl.config.teachers import recorded_teachers
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.observability.recorded import (
    RecordedRun,
    read_recorded,
    recorded_config,
    value_in,
)
from torchtitan_rl.observability.sinks import Row
from torchtitan_rl.orchestration.batching import Batched
from torchtitan_rl.rollout.rendering import load_tokenizer
from torchtitan_rl.serving.config import Keys
from torchtitan_rl.training.batch import StepOutput
from torchtitan_rl.training.checkpoint_files import read_document
from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.types import RolloutGroup

if TYPE_CHECKING:
    from torchtitan_rl.backends.monarch.trainer import MonarchTrainer

_PROG = "torchtitan-rl replay"
_MAX_EXPONENT = 80.0  # of a ratio that is shown
_COMPARED = ("loss", "grad_norm", "clip_share", "ratio_mean", "ratio_max", "masked_share", "kl_k3")


@dataclass(frozen=True, kw_only=True)
class ReplayedTrainer:
    """The part of the trainer's configuration that a replay may change."""

    loss: LossConfig = field(default_factory=LossConfig)


@dataclass(frozen=True, kw_only=True)
class ReplayedPolicy:
    """Where the policy is with which the run began."""

    checkpoint: OptionalName = ""
    """A directory in Hugging Face format; by default, where the run found it."""


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Compute the update of one step again, from the rollouts of a run that was started with
    ``--metrics.rollouts-per-step all``.

    Options of ``--trainer.loss`` show, side by side, what another loss would have done."""

    step: Count = 0
    """The step; 0 is the last one."""
    out: File | None = None
    """JSON Lines file for the tokens of all rollouts: their logprobs, ratios, advantages and loss
    terms."""
    rollout: OptionalName = ""
    """Id of the rollout whose tokens are printed; by default the one with the largest gradient."""
    policy: ReplayedPolicy = field(default_factory=ReplayedPolicy)
    trainer: ReplayedTrainer = field(default_factory=ReplayedTrainer)


def main(words: Sequence[str]) -> int:
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        raise ConfigError(f"RUN_DIR is missing: {_PROG} RUN_DIR [options]")
    if words[0].startswith("-"):
        parse_options(ReplayConfig, words, prog=f"{_PROG} RUN_DIR")
    recorded = read_recorded(Path(words[0]))
    if recorded.identity.get("mode") == "generate":
        raise ConfigError(f"RUN_DIR is {words[0]}: this run only generated; give one that trained")
    if recorded.identity.get("trainer.sft_coefficient"):
        raise ConfigError(
            f"RUN_DIR is {words[0]}: this run trained on conversations, too "
            "(trainer.sft_coefficient), so its steps do not follow from its rollouts; give another"
        )
    # It is needed before the other options can be parsed.
    given, _ = take_options(words, ("--policy.checkpoint",))
    config, policy_dir = recorded_config(recorded, policy=given.get("--policy.checkpoint", ""))
    default = ReplayConfig(trainer=ReplayedTrainer(loss=config.trainer.loss))
    options = parse_options(ReplayConfig, words[1:], prog=f"{_PROG} {words[0]}", default=default)
    check_fields(options)
    step = options.step or recorded.num_steps
    if step > recorded.num_steps:
        raise ConfigError(
            f"step is {step}: the run has taken {recorded.num_steps} steps; give 1 to "
            f"{recorded.num_steps}"
        )
    if options.out is not None and (errors := output_file_errors("out", options.out)):
        raise ConfigError(errors)
    base, checkpoint = recorded.checkpoint_before(step)
    recorded.check(base + 1, step)
    original, other = config.trainer.loss, options.trainer.loss
    staleness, updates = config.schedule.staleness, config.trainer.updates_per_batch
    errors = loss_errors(other, staleness=staleness, updates=updates)
    if errors := errors + pair_errors(other, config.rollout, is_taught=config.teacher.is_on):
        raise ConfigError(errors)
    with tempfile.TemporaryDirectory(prefix="torchtitan-rl-replay-") as folder:
        config = replace(config, output_dir=Path(folder), name="replay")
        config.log_dir.mkdir(parents=True)
        # The reference policy is loaded if one of the losses needs it.
        loaded = other if other.needs_reference else original
        trainer = replace(config.trainer, loss=loaded)
        machine = machine_facts()
        cores = sorted(os.sched_getaffinity(0))[: machine.num_cores]
        config = replace(config, trainer=trainer, mode="train")
        plan = plan_processes(config, devices=machine.cuda_devices, cores=cores)
        replay = Replay(
            recorded=recorded,
            prepared=PreparedRun(
                config=config,
                policy_dir=policy_dir,
                plan=plan,
                keys=Keys(),
                teachers=recorded_teachers(config, recorded.identity),
            ),
            options=options,
            step=step,
            base=base,
            checkpoint=checkpoint,
            original=original,
        )
        return run_command(partial(_run, replay), log_dir=config.log_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A replay that is about to start. ``base`` is the step of ``checkpoint``, or 0. ``original``
    is the loss of the run."""

    recorded: RecordedRun
    prepared: PreparedRun
    options: ReplayConfig
    step: int
    base: int
    checkpoint: Path | None
    original: LossConfig

    @property
    def other(self) -> LossConfig | None:
        """The loss to compare with, if it is another one."""
        loss = self.options.trainer.loss
        return None if loss == self.original else loss


async def _run(replay: Replay, _: StopSignals) -> int:
    from torchtitan_rl.backends.monarch.run import run_processes  # seconds

    start = f"the checkpoint of step {replay.base}" if replay.base else "the initial policy"
    folder = replay.recorded.run_dir
    print(f"replaying steps {replay.base + 1} to {replay.step} of {folder}, from {start}")
    async with run_processes(replay.prepared, trace_dir=None) as processes:
        return await replay_steps(replay, processes.trainers[0])


async def replay_steps(replay: Replay, trainer: MonarchTrainer) -> int:
    """Take the steps, and show the last one. Returns the exit code."""
    recorded, step = replay.recorded, replay.step
    tokenizer = load_tokenizer(replay.prepared.policy_dir)
    batcher = batcher_of(replay.prepared, tokenizer)
    before = replay.prepared.config.run_dir.absolute() / "before"
    version, are_equal = 0, True
    if replay.checkpoint is not None:
        await trainer.load_checkpoint(replay.checkpoint)
        version = read_document(replay.checkpoint)["version"]
    for number, groups in recorded.steps(replay.base + 1, step):
        batched = await asyncio.to_thread(batcher, groups)
        if batched.batch is None:
            print(f"step {number}: no token to train on; its weights stay")
            continue
        is_compared = number == step and replay.other is not None
        if is_compared:
            await trainer.save_checkpoint(before, {}, version=version)
            await trainer.finish_checkpoint()
        output = await trainer.train_step(batched.batch, replay.original)
        version = output.version
        are_equal &= _is_equal(recorded, number, output)
        other: StepOutput | None = None
        if is_compared:
            await trainer.load_checkpoint(before)
            other = await trainer.train_step(batched.batch, replay.other)
        if number == step:
            _show(replay, groups, batched, output, other, tokenizer)
    return int(not are_equal)


def _is_equal(recorded: RecordedRun, step: int, output: StepOutput) -> bool:
    digest, found = recorded.digest(step), output.metrics["weights_digest"]
    if digest == found:
        print(f"step {step}: the weights equal those of the run (digest {found:.0f})")
    else:
        was = "has none" if digest is None else f"is {digest:.0f}"
        print(f"step {step}: THE WEIGHTS DIFFER: digest {found:.0f}; that of the run {was}")
    return digest == found


def _show(
    replay: Replay,
    groups: Sequence[RolloutGroup],
    batched: Batched,
    output: StepOutput,
    other: StepOutput | None,
    tokenizer: Any,
) -> None:
    print("\n".join(comparison(replay.recorded.rows[replay.step], output, other)))
    rows = list(token_rows(batched, output, other, tokenizer.decode))
    if replay.options.out is not None:
        with replay.options.out.open("w") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        print(f"tokens of all rollouts: {replay.options.out}")
    rewards = {one.rollout_id: one.reward for group in groups for one in group.rollouts}
    name = replay.options.rollout or _largest_gradient(rows)
    own = [row for row in rows if row["rollout_id"] == name]
    if not own:
        print(
            f"rollout {name}: no token of it is in the batch of step {replay.step}", file=sys.stderr
        )
        return
    reward = rewards[name]
    name = name if name.isprintable() else ascii(name)
    print(f"rollout {name}, reward {'none' if reward is None else format(reward, 'g')}:")
    print("\n".join(token_table(own)))


def comparison(row: Row, output: StepOutput, other: StepOutput | None) -> list[str]:
    """A table of the step's loss, gradient and ratios: as the run wrote them, and as replayed."""
    columns = {"run": {name: value_in(row, f"trainer/{name}") for name in _COMPARED}}
    columns["replay"] = dict(output.metrics)
    if other is not None:
        columns["other loss"] = dict(other.metrics)
    lines = [" " * 14 + "".join(f"{name:>16}" for name in columns)]
    for name in _COMPARED:
        values = [values.get(name) for values in columns.values()]
        if any(value is not None for value in values):
            cells = ("-" if value is None else f"{value:.9g}" for value in values)
            lines.append(f"{name:<14}" + "".join(f"{cell:>16}" for cell in cells))
    return lines


def token_rows(
    batched: Batched, output: StepOutput, other: StepOutput | None, decode: Any
) -> Iterator[dict[str, Any]]:
    """Yield one object for each sampled token of the batch. Unknown values are None."""
    batch, tokens = batched.batch, output.tokens
    assert batch is not None
    assert tokens is not None
    columns = {
        "trainer_logprob": tokens.logprobs,
        "loss": tokens.losses,
        "gradient": tokens.gradients,
    }
    if other is not None and other.tokens is not None:
        columns |= {"other_loss": other.tokens.losses, "other_gradient": other.tokens.gradients}
    unknown = itertools.repeat(math.nan)
    by_episode = {name: batched.by_episode(values_N) for name, values_N in columns.items()}
    for index, episode in enumerate(batched.episodes):
        own = (values[index] for values in by_episode.values())
        columns_of_tokens = zip(*(unknown if one is None else one for one in own), strict=False)
        tokens_of = zip(episode.versions, columns_of_tokens, strict=False)
        for position, (version, values) in enumerate(tokens_of):
            if version < 0:  # not sampled
                continue
            found = dict(zip(by_episode, map(_finite, values), strict=True))
            logprob, trained = _finite(episode.logprobs[position]), found["trainer_logprob"]
            ratio = None
            if logprob is not None and trained is not None:
                ratio = math.exp(min(trained - logprob, _MAX_EXPONENT))
            yield {
                "rollout_id": episode.rollout_id,
                "episode": index,
                "position": position,
                "token_id": episode.token_ids[position],
                "text": decode([episode.token_ids[position]]),
                "version": version,
                "mask": int(trained is not None),
                "advantage": episode.advantages[position],
                "logprob": logprob,
                "ratio": ratio,
                **found,
            }


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _largest_gradient(rows: Sequence[Mapping[str, Any]]) -> str:
    sizes: dict[str, float] = {}
    for row in rows:
        size = sizes.get(row["rollout_id"], 0.0)
        sizes[row["rollout_id"]] = size + abs(row["gradient"] or 0.0)
    return max(sizes, key=lambda name: sizes[name])


_TABLE = {
    "position": "{:d}",
    "text": "{}",
    "logprob": "{:.4f}",
    "trainer_logprob": "{:.4f}",
    "ratio": "{:.4f}",
    "advantage": "{:+.3f}",
    "mask": "{:d}",
    "loss": "{:+.2e}",
    "gradient": "{:+.2e}",
    "other_loss": "{:+.2e}",
    "other_gradient": "{:+.2e}",
}


def token_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of one rollout's tokens."""
    names = [name for name in _TABLE if name in rows[0]]
    lines = [names]
    for row in rows:
        shown = {**row, "text": ascii(row["text"])[:20]}
        lines.append(["-" if shown[n] is None else _TABLE[n].format(shown[n]) for n in names])
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
