"""The generating side: admits problems while there is room, rolls them out, and keeps, skips or
resamples the groups.

Invariants: however its environment behaves, an admitted group either becomes a finished group in
the buffer, or is discarded with a cause. Restored groups start first. A group is rolled out only by
replicas that hold its admitted version or a newer one. When the producer fails, its groups keep
running until `close`, so that a checkpoint can still save their turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial

from torchtitan_rl.aio import cancel_all
from torchtitan_rl.errors import NothingTrainedError, OutputError, TorchtitanRLError
from torchtitan_rl.orchestration.checkpointing import RecordedGroups
from torchtitan_rl.orchestration.config import ControllerConfig
from torchtitan_rl.orchestration.journal import JournalError
from torchtitan_rl.orchestration.records import group_of
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.work_buffer import Entry, GroupState
from torchtitan_rl.rollout.episodes import has_signal
from torchtitan_rl.rollout.records import RecordedRollout
from torchtitan_rl.rollout.task import adapts
from torchtitan_rl.types import Problem, Rollout, RolloutGroup

_ROLLOUTS_AT_ONCE = 128  # start within one moment; each takes the event loop about 0.3 ms
_FREE_S = 0.05
_PATIENCE = 10  # factor of `max_empty_batches` for a dataset that chooses by earlier outcomes


class Producer:
    """Runs one task for each live group. The consumer calls `restart`."""

    def __init__(
        self, config: ControllerConfig, state: RunState, *, recorded: RecordedGroups
    ) -> None:
        self._config = config
        self._num_groups = config.num_steps * config.rollout.groups_per_step
        # A synchronous step starts more groups than it trains, and restarts the others.
        excess = config.capacity.buffer - config.capacity.groups_per_step
        self._most_started = self._num_groups + (0 if config.capacity.staleness else excess)
        self._state = state
        self._parts = state.parts
        self._buffer = state.buffer
        self._ledger = state.ledger
        self._recorded = recorded
        # Oldest first. A restarted group also has its cancelled task, until that task has ended.
        self._group_of: dict[asyncio.Task[None], str] = {}
        self._newest: dict[str, asyncio.Task[None]] = {}  # the running one of each group
        self._restarted: set[asyncio.Task[None]] = set()  # cancelled, and may still get tokens
        self._failure: BaseException | None = None  # the first error of a group's task
        self._skipped_in_a_row = 0
        self._adapts = adapts(state.parts.dataset)

    async def run(self) -> None:
        """Keep the buffer full until cancelled. Cancelling this does not cancel the running groups.
        Raises TorchtitanRLError: the dataset has ended, or no group can be trained on."""
        if not self._is_over():
            for entry in self._buffer.entries:
                if entry.state is GroupState.WAITING and entry.group_id not in self._newest:
                    self._launch(entry)
        while True:
            await self._state.wait_until(
                lambda: (
                    self._failure is not None
                    or self._must_report_outcomes()
                    or (self._has_room() and (not self._state.skipped or self._may_replace()))
                ),
                "the dataset waits for room in the buffer",
            )
            if self._failure is not None:
                raise self._failure
            if self._must_report_outcomes():
                self._state.record_outcomes([])
                continue
            await self._fill()

    async def close(self) -> None:
        """Cancel all groups. Returns when every rollout has ended."""
        await cancel_all(self._group_of)

    async def settle(self) -> None:
        """Return when the rollouts that `restart` cancelled have ended."""
        ending = [task for task in self._group_of if task.cancelling()]
        if ending:
            await asyncio.wait(ending)

    def restart(self, group_ids: Sequence[str]) -> None:
        """Discard the tokens of these groups, and roll the groups out again at the current version
        (without an await: right after the optimizer step that is the step's). New rollouts start
        when the old ones have ended. After the last step they wait for a resumed run."""
        for name in group_ids:
            old = self._newest.get(name)
            if old is not None:
                old.cancel()
                self._restarted.add(old)
            self._discard_restarted(name)
            entry = self._buffer.restart(name, version=self._state.version)
            if not self._is_over():
                self._launch(entry, after=old)

    def _must_report_outcomes(self) -> bool:
        """Whether to report outcomes now, because a whole batch of groups was skipped: a dataset
        that chooses by outcomes would not learn that all its problems are skipped."""
        return self._has_skipped_a_batch() and not self._is_over() and self._may_replace()

    def _may_replace(self) -> bool:
        """Whether new groups may replace skipped ones now. At staleness 0, the choice of a dataset
        by earlier outcomes must not depend on the order in which running groups end."""
        if not self._adapts or self._config.schedule.staleness > 0:
            return True
        return all(entry.group is not None for entry in self._buffer.entries)

    def _has_room(self) -> bool:
        started = self._ledger.groups_trained + len(self._buffer)
        is_next = self._buffer.has_room and not self._is_over() and started < self._most_started
        return is_next and not self._has_skipped_a_batch()

    def _has_skipped_a_batch(self) -> bool:
        skipped = len(self._state.skipped)
        return self._adapts and skipped >= self._config.rollout.groups_per_step

    def _is_over(self) -> bool:
        """Whether all groups that the run trains have been trained."""
        return self._ledger.groups_trained >= self._num_groups

    async def _fill(self) -> None:
        """Admit groups while there is room, and leave the event loop free from time to time:
        thousands of rollouts that start at one moment would hold it up."""
        at_once = max(1, _ROLLOUTS_AT_ONCE // self._config.rollout.group_size)
        number = 0
        while self._has_room():
            self._admit_next()
            number += 1
            if number % at_once == 0:
                await asyncio.sleep(_FREE_S)

    def _admit_next(self) -> None:
        dataset = self._parts.dataset
        try:
            problem = dataset.next()
        except StopIteration:
            raise TorchtitanRLError(
                f"the dataset ended after {self._ledger.groups_admitted} groups, in step "
                f"{self._state.step + 1}; give fewer steps, or a dataset that starts again"
            ) from None
        group_id = f"e{dataset.epoch}/{problem.problem_id}"
        if group_id in self._buffer:
            raise TorchtitanRLError(
                f"the dataset gave problem {problem.problem_id} twice in epoch {dataset.epoch}, "
                "while its first group is under way; ids must be unique"
            )
        self._admit(group_id, problem)
        self._state.notify()

    def _admit(self, group_id: str, problem: Problem, *, resamples: int = 0) -> None:
        version = self._state.version
        self._launch(self._buffer.admit(group_id, problem, version=version, resamples=resamples))

    def _launch(self, entry: Entry, *, after: asyncio.Task[None] | None = None) -> None:
        task = asyncio.create_task(self._roll_out(entry, after), name=f"group {entry.group_id}")
        self._group_of[task] = entry.group_id
        self._newest[entry.group_id] = task
        task.add_done_callback(self._on_end)

    def _discard_restarted(self, group_id: str) -> None:
        self._ledger.discard_tokens(group_id, "restarted", self._ledger.tokens_of(group_id))

    def _on_end(self, task: asyncio.Task[None]) -> None:
        group_id = self._group_of.pop(task)
        if self._newest.get(group_id) is task:
            del self._newest[group_id]
        if task in self._restarted:
            self._restarted.remove(task)
            self._discard_restarted(group_id)  # tokens of requests that had ended before
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._state.notify()

    async def _roll_out(self, entry: Entry, after: asyncio.Task[None] | None) -> None:
        if after is not None:  # wait even if it is done: `_on_end` must count its tokens first
            waiting = f"group {entry.group_id} waits for its old rollouts to end"
            with self._state.waits.track(waiting):
                await asyncio.wait({after})
        self._buffer.start(entry.group_id)
        group = await self._parts.rollouter.run_group(
            entry.group_id,
            entry.problem,
            size=self._config.rollout.group_size,
            seed=self._config.seed,
            attempt=entry.resamples,
            min_version=entry.admitted_version,
            recorded=self._pop_recorded(entry),
            on_rollout=lambda _: self._state.notify(),
            on_turn=self._write_turn,
            on_discard=partial(self._discard_tokens, asyncio.current_task()),
            score_tokens=self._score_tokens if self._is_scored(entry.problem) else None,
        )
        self._keep_or_drop(entry, group)
        self._state.notify()

    def _is_scored(self, problem: Problem) -> bool:
        teachers = self._parts.teachers
        return teachers is not None and teachers.teach(problem)

    async def _score_tokens(self, rollout: Rollout, problem: Problem) -> Rollout:
        """Let the teacher score a rollout. If it fails, the run ends, but the rollout goes on until
        it has been saved."""
        assert self._parts.teachers is not None
        try:
            return await self._parts.teachers.score(rollout, problem)
        except Exception as error:
            self._failure = self._failure or error
            self._state.notify()
            await asyncio.Event().wait()
            raise

    def _keep_or_drop(self, entry: Entry, group: RolloutGroup) -> None:
        """Keep the group for a batch, skip it or resample it."""
        schedule = self._config.schedule
        is_resampled = schedule.zero_variance == "resample"
        is_last_try = is_resampled and entry.resamples >= schedule.max_resamples
        if schedule.zero_variance == "train" or is_last_try or self._has_signal(group):
            self._skipped_in_a_row = 0
            self._buffer.finish(group)
            return
        cause = "resampled" if is_resampled else "zero_variance"
        self._buffer.discard(group.group_id, cause)
        if is_resampled:
            self._admit(entry.group_id, entry.problem, resamples=entry.resamples + 1)
            return
        self._state.skipped.append(self._state.outcome(group))
        self._skipped_in_a_row += 1
        most = schedule.max_empty_batches * self._config.rollout.groups_per_step
        most *= _PATIENCE if self._adapts else 1
        if self._skipped_in_a_row >= most:
            raise NothingTrainedError(
                f"{self._skipped_in_a_row} groups in a row had rewards that do not differ, and "
                "schedule.zero_variance is skip: the problems are all solved or all too hard; give "
                "schedule.zero_variance train or a higher schedule.max_empty_batches"
            )

    def _has_signal(self, group: RolloutGroup) -> bool:
        """Whether to train on the group: a teacher is a signal, too, and the batcher reports the
        failures of groups without any reward."""
        failed = all(rollout.reward is None for rollout in group.rollouts)
        is_taught = self._is_scored(group.problem) or bool(
            self._config.teacher.source_for(group.problem.task)
        )
        return failed or is_taught or has_signal(group.rollouts, self._config.rollout)

    def _pop_recorded(self, entry: Entry) -> Mapping[str, RecordedRollout]:
        """Take the group's turns from before the resume, and add their tokens to the ledger."""
        rollouts, rolled_back = self._recorded.pop(
            entry.group_id, admitted_version=entry.admitted_version
        )
        kept = sum(recorded.num_tokens for recorded in rollouts.values())
        self._ledger.generate(entry.group_id, kept + rolled_back)
        self._ledger.discard_tokens(entry.group_id, "rolled_back", rolled_back)
        return rollouts

    def _write_turn(self, recorded: RecordedRollout) -> None:
        try:
            self._parts.claim.check()
            self._parts.journal.append(recorded)
        except (JournalError, OutputError) as error:
            self._state.recorder.say(f"NO JOURNAL of turns until the next checkpoint: {error}")

    def _discard_tokens(
        self, task: asyncio.Task[None] | None, rollout_id: str, cause: str, num_tokens: int
    ) -> None:
        if task in self._restarted:
            return  # all tokens are discarded: at the restart, and when the task ends
        self._ledger.discard_tokens(group_of(rollout_id), cause, num_tokens)
