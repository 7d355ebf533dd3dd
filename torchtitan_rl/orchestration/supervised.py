"""Runs the steps of a run on conversations from files, instead of rollouts. State, checkpoints,
records and endings are those of `Controller`.

Invariants: the examples of a step depend only on the configuration and the step, so a resumed run
takes the same steps. Step, version and metrics row change together, without an await between them.
If the loop fails, a checkpoint of the last finished step is saved first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from torchtitan_rl.aio import cancel_all, first_of
from torchtitan_rl.data.conversations import Conversations, Example
from torchtitan_rl.environments.supervised import SupervisedTask
from torchtitan_rl.errors import NothingTrainedError, OutputError
from torchtitan_rl.files import replace_file
from torchtitan_rl.orchestration.checkpointing import RunCheckpointer
from torchtitan_rl.orchestration.config import ControllerConfig
from torchtitan_rl.orchestration.consumer import StopRequested, then_save
from torchtitan_rl.orchestration.records import HeldOutRecord, StepRecord, TokenCounts
from torchtitan_rl.orchestration.run_state import Parts, RunState
from torchtitan_rl.orchestration.watchdog import Watchdog
from torchtitan_rl.training.batch import (
    PreferenceLoss,
    StepLoss,
    SupervisedLoss,
    TrainingBatch,
    imitated_mask,
    sums_by_episode,
)
from torchtitan_rl.training.checkpoints import NewestCheckpoint
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.training.preference import preference_metrics, preferences

REFERENCES = "reference_logprobs.json"
"""The file in the run's folder with the logprobs of pairs under the initial policy."""

_ROWS_AT_A_TIME = 64  # of an evaluation, and of reference logprobs


class _Batch(NamedTuple):
    batch: TrainingBatch | None  # None: no example fits
    examples: Sequence[Example]
    tokens: TokenCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """What a run trains on. ``held_out`` is None without evaluations."""

    task: SupervisedTask
    train: Conversations
    held_out: Conversations | None


class SupervisedController:
    """Takes the steps to the end, to a stop request or to an error, like `Controller`."""

    def __init__(
        self, config: ControllerConfig, parts: Parts, supervision: Supervision, run_dir: Path
    ) -> None:
        self._config = config
        self._parts = parts
        self._supervision = supervision
        self._state = state = RunState(config.capacity, parts)
        self._checkpointer = RunCheckpointer(state, config.checkpoint)
        self._watchdog = Watchdog(
            state.waits,
            num_changes=lambda: state.num_changes,
            report_wait_s=config.schedule.report_wait_s,
            max_wait_s=config.schedule.max_wait_s,
            activities=tuple,
            say=state.recorder.say,
        )
        self._references_file = run_dir / REFERENCES
        # By row; None: it is too long.
        self._references: dict[str, tuple[float, float] | None] = {}

    def request_stop(self) -> None:
        """Stop cleanly: finish the optimizer step and save."""
        self._state.is_stopping = True

    def now(self) -> dict[str, Any]:
        """Describe what happens at this moment, as JSON types."""
        state = self._state
        return {
            "step": state.step,
            "version": state.version,
            "num_steps": self._config.num_steps,
            "waits": [wait.to_json(state.waits.now_s()) for wait in state.waits.open()],
            "chain": self._watchdog.chain(),
        }

    async def run(self, *, resume_from: NewestCheckpoint | None) -> None:
        """Take all remaining steps. ``resume_from`` is as in `Controller.run`.

        Raises:
            StopRequested: `request_stop` was called; a checkpoint is written.
            DataError: a row cannot be used; a checkpoint is written.
            NothingTrainedError: no step had an example that fits; a checkpoint is written.
            OutputError: the references of pairs, or a row, could not be written.
            DivergedError, TrainerLostError: no checkpoint is written; earlier ones are unchanged.
            DeadlineError: nothing changed for ``schedule.max_wait_s``.
            RunTakenOverError: another controller owns the run's folder; nothing is saved.
        """
        await first_of(
            self._run(resume_from),
            self._parts.trainer.wait_until_lost(),
            self._parts.claim.wait_until_lost(),
            self._watchdog.run(),
        )

    async def _run(self, resume_from: NewestCheckpoint | None) -> None:
        if self._supervision.task.beta is not None:
            with self._state.recorder.phase("reference"):
                await self._complete_references()  # the trainer has the initial weights
        with self._state.recorder.phase("restore"):
            await self._checkpointer.restore(resume_from)
        try:
            save = self._checkpointer.finish
            await then_save(self._take_steps(), save, self._state.recorder.say)
        finally:
            self._parts.journal.close()

    async def _take_steps(self) -> None:
        state, num_steps = self._state, self._config.num_steps
        await self._evaluate_if_due()
        reading = self._read_ahead()
        try:
            while state.step < num_steps:
                if state.is_stopping:
                    raise StopRequested(state.step)
                started_s = time.monotonic()
                with state.recorder.phase("rows"), state.waits.track("rows are being read"):
                    batched = await reading
                read_s = time.monotonic() - started_s
                reading = self._read_ahead(after=state.step + 1)
                await self._take_step(batched, started_s=started_s, read_s=read_s)
                await self._evaluate_if_due()
                every = self._config.checkpoint.every
                if every and state.step % every == 0 and state.step < num_steps:
                    await self._checkpointer.save()
        finally:
            await cancel_all([reading])
        if state.version == 0:
            raise NothingTrainedError("no row of the run fits; raise trainer.max_episode_tokens")

    def _read_ahead(self, after: int | None = None) -> asyncio.Task[_Batch]:
        """Read the examples of the step after ``after`` while the trainer trains."""
        step = (self._state.step if after is None else after) + 1
        return asyncio.create_task(asyncio.to_thread(self._batch_of, step))

    def _batch_of(self, step: int) -> _Batch:
        if step > self._config.num_steps:
            return _Batch(None, (), TokenCounts(generated=0, trained=0))
        examples, too_long = self._supervision.train.read(self._supervision.train.numbers(step))
        dropped = sum(one.num_learned for one in too_long)
        trained = sum(one.num_learned for one in examples)
        tokens = TokenCounts(
            generated=trained + dropped,
            trained=trained,
            discarded={"oversized_episode": dropped} if dropped else {},
        )
        return _Batch(packed(examples), examples, tokens)

    async def _take_step(self, batched: _Batch, *, started_s: float, read_s: float) -> None:
        state, step = self._state, self._state.step + 1
        metrics: Mapping[str, float] = {}
        version = state.version
        with state.recorder.phase("train"):
            if batched.batch is None:
                state.recorder.say(f"step {step} has no row that fits; its weights stay")
            else:
                limit_s = self._config.trainer.call_limit_s
                with state.waits.track(f"the trainer takes step {step}", limit_s=limit_s):
                    output = await self._parts.trainer.train_step(
                        batched.batch, self._loss(batched.examples)
                    )
                metrics, version = output.metrics, output.version
        state.step, state.version = step, version
        wall_s = time.monotonic() - started_s
        state.recorder.record_step(
            StepRecord(
                step=step,
                version=version,
                groups=(),
                tokens=batched.tokens,
                trainer=metrics,
                publish_s=0.0,
                rollout_s=read_s,
                train_s=wall_s - read_s,
                wall_s=wall_s,
            )
        )
        state.notify()

    def _loss(self, examples: Sequence[Example]) -> StepLoss:
        beta = self._supervision.task.beta
        if beta is None:
            return SupervisedLoss()
        return PreferenceLoss(beta=beta, references=self._references_of(examples).reshape(-1))

    def _references_of(self, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        """Return [P, 2]."""
        return np.array([self._references[one.name] for one in examples], dtype=np.float64)

    async def _evaluate_if_due(self) -> None:
        state, held_out = self._state, self._supervision.held_out
        every = self._supervision.task.held_out.every
        is_due = state.step in (0, self._config.num_steps) or (every and state.step % every == 0)
        if held_out is None or not is_due or state.evaluated_step == state.step:
            return
        started_s = time.monotonic()
        with state.recorder.phase("evaluation"):
            metrics = await self._evaluate(held_out)
        state.evaluated_step = state.step
        state.recorder.record_held_out(
            HeldOutRecord(
                step=state.step,
                version=state.version,
                seconds=time.monotonic() - started_s,
                metrics=metrics,
            )
        )
        state.notify()

    async def _evaluate(self, held_out: Conversations) -> dict[str, float]:
        numbers = range(self._num_held_out(held_out))
        examples, _ = await asyncio.to_thread(held_out.read, numbers)
        sums_E = await self._sums(examples)
        num_tokens = sum(one.num_learned for one in examples)
        metrics = {"rows": float(len(examples)), "tokens": float(num_tokens)}
        beta = self._supervision.task.beta
        if beta is None:
            return metrics | {"loss": -float(sums_E.sum()) / num_tokens}
        found = preferences(sums_E.reshape(-1, 2), self._references_of(examples), beta=beta)
        of_pairs = preference_metrics(found.rewards_P2)
        return metrics | {"loss": float(found.losses_P.mean())} | of_pairs

    def _num_held_out(self, held_out: Conversations) -> int:
        wanted, there = self._supervision.task.held_out.num_rows, held_out.rows.num_rows
        return min(wanted or there, there)

    async def _sums(self, examples: Sequence[Example]) -> npt.NDArray[np.float64]:
        """Return the sum of the learned tokens' logprobs of each episode."""
        sums = [np.empty(0)]
        for start in range(0, len(examples), _ROWS_AT_A_TIME):
            batch = packed(examples[start : start + _ROWS_AT_A_TIME])
            assert batch is not None
            limit_s = self._config.trainer.call_limit_s
            with self._state.waits.track("the trainer computes logprobs", limit_s=limit_s):
                logprobs_N = await self._parts.trainer.logprobs(batch)
            sums.append(sums_by_episode(batch, logprobs_N, imitated_mask(batch)))
            self._state.notify()
        return np.concatenate(sums)

    async def _complete_references(self) -> None:
        """Read the reference logprobs of all pairs of the run. Compute and write missing ones."""
        with suppress(FileNotFoundError, msgspec.DecodeError):
            self._references = msgspec.json.decode(
                self._references_file.read_bytes(), type=dict[str, tuple[float, float] | None]
            )
        num_known = len(self._references)
        train, held_out = self._supervision.train, self._supervision.held_out
        num_steps = -(-train.rows.num_rows // self._supervision.task.data.per_step)
        for step in range(1, min(self._config.num_steps, num_steps) + 1):
            await self._add_references(train, train.numbers(step))
        if held_out is not None:
            await self._add_references(held_out, range(self._num_held_out(held_out)))
        if len(self._references) > num_known:
            self._parts.claim.check()
            try:
                replace_file(self._references_file, msgspec.json.encode(self._references))
            except OSError as error:
                raise OutputError(f"{self._references_file}: {error}") from error

    async def _add_references(self, conversations: Conversations, numbers: range) -> None:
        names = await asyncio.to_thread(conversations.names, numbers)
        if all(name in self._references for name in names):
            return
        examples, too_long = await asyncio.to_thread(conversations.read, numbers)
        self._references |= {one.name: None for one in too_long}
        sums_P2 = (await self._sums(examples)).reshape(-1, 2).tolist()
        for one, (chosen, rejected) in zip(examples, sums_P2, strict=True):
            self._references[one.name] = chosen, rejected


def packed(examples: Sequence[Example]) -> TrainingBatch | None:
    """Pack all episodes of the examples, in their order."""
    episodes = [episode for example in examples for episode in example.episodes]
    longest = max((len(one.token_ids) for one in episodes), default=0)
    return pack_episodes(episodes, row_len=longest, temperature=1.0).batch
