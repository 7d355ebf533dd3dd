"""The generating side: admits problems while there is room, rolls them out, sorts what comes back.

Invariants: an admitted group ends finished in the buffer or discarded with a cause, whatever its
environment does; a group that was restored goes first; a group is rolled out only by replicas that
hold at least the version it was admitted at; when the producer fails, its groups run on until
`close`, so that a checkpoint can still hold them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.orchestration.recovery import RecordedGroups
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.sampling import group_of
from torchtitan_rl.orchestration.work_buffer import Entry, GroupState
from torchtitan_rl.rollout.group_settings import OnTurn
from torchtitan_rl.rollout.recorded import RecordedRollout
from torchtitan_rl.rollout.rollout_run import RolloutActivity
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.rollout.task import Dataset
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import Problem, RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """``num_groups`` are trained in the whole run, ``surplus`` more may be started at its end."""

    num_groups: int
    surplus: int
    group_size: int
    temperature: float
    seed: int
    zero_variance: Literal["train", "skip", "resample"]
    max_resamples: int
    max_skipped: int  # groups in a row


class Producer:
    """Runs alongside the trainer, which calls `restart`."""

    def __init__(
        self,
        settings: ProducerSettings,
        state: RunState,
        *,
        dataset: Dataset,
        rollouter: Rollouter,
        router: GeneratorRouter,
        recorded: RecordedGroups,
        on_turn: OnTurn,
        on_group_ended: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._state = state
        self._dataset = dataset
        self._rollouter = rollouter
        self._router = router
        self._recorded = recorded
        self._on_turn = on_turn
        self._on_group_ended = on_group_ended
        self._ledger = state.ledger
        self._running: dict[str, asyncio.Task[None]] = {}  # newest task of each group
        self._tasks: set[asyncio.Task[None]] = set()  # all of them, restarted groups' old ones too
        self._failure: BaseException | None = None  # of a group's task, the first
        self._skipped_in_a_row = 0

    async def run(self) -> None:
        """Keep the buffer full until cancelled. Groups that run are not cancelled with it.

        Raises:
            TorchtitanRLError: the dataset has ended, or no group is worth training on.
        """
        if not self._is_over():
            for entry in self._state.buffer.entries:
                if entry.state is GroupState.WAITING and entry.group_id not in self._running:
                    self._launch(entry)
        while True:
            await self._state.until(
                lambda: self._failure is not None or self._may_admit(),
                "the dataset waits for room in the buffer",
            )
            if self._failure is not None:
                raise self._failure
            self._admit(self._next_problem())

    async def close(self) -> None:
        """End all groups that run; returns when every rollout has ended."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def settle(self) -> None:
        """Return when the rollouts that `restart` gave up have ended."""
        ending = {task for task in self._tasks if task.cancelling()}
        if ending:
            await asyncio.wait(ending)

    def restart(self, group_ids: Sequence[str]) -> None:
        """Give up what these groups sampled and roll them out again at the current version.

        Takes effect at once: no await lies between the optimizer step and a state in which the
        groups belong to its version. Their new rollouts start when the old ones have ended. After
        the last step they are not started again, and wait for a run with more steps.
        """
        for name in group_ids:
            old = self._running.get(name)
            if old is not None:
                old.cancel()
            self._ledger.discard_tokens(name, "restarted", self._ledger.tokens_of(name))
            entry = self._state.buffer.restart(name, version=self._state.version)
            if not self._is_over():
                self._launch(entry, after=old)

    def activities(self) -> Sequence[RolloutActivity]:
        """What each unfinished rollout does."""
        return self._rollouter.activities()

    def _may_admit(self) -> bool:
        buffer, settings = self._state.buffer, self._settings
        wanted = settings.num_groups + settings.surplus
        return buffer.has_room and not self._is_over() and buffer.trained + len(buffer) < wanted

    def _is_over(self) -> bool:
        """Every group that the run trains has been trained."""
        return self._state.buffer.trained >= self._settings.num_groups

    def _next_problem(self) -> Problem:
        try:
            return self._dataset.next()
        except StopIteration:
            raise TorchtitanRLError(
                f"the dataset ended after {self._state.buffer.admitted} groups, in step "
                f"{self._state.step + 1}; give fewer steps, or a dataset that starts again"
            ) from None

    def _admit(self, problem: Problem) -> None:
        group_id = f"e{self._dataset.epoch}/{problem.problem_id}"
        if group_id in self._state.buffer:
            raise TorchtitanRLError(
                f"the dataset gave problem {problem.problem_id} twice in epoch "
                f"{self._dataset.epoch}, while its first group is under way; ids must be unique"
            )
        entry = self._state.buffer.admit(group_id, problem, version=self._state.version)
        self._ledger.admit(group_id)
        self._launch(entry)
        self._state.changed()

    def _launch(self, entry: Entry, *, after: asyncio.Task[None] | None = None) -> None:
        task = asyncio.create_task(self._roll_out(entry, after), name=f"group {entry.group_id}")
        self._running[entry.group_id] = task
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        # A restarted or resampled group's next task has its id already.
        self._running = {name: one for name, one in self._running.items() if one is not task}
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._state.changed()

    async def _roll_out(self, entry: Entry, after: asyncio.Task[None] | None) -> None:
        if after is not None and not after.done():
            with self._state.waits.on(f"group {entry.group_id} waits for its old rollouts to end"):
                await asyncio.wait({after})
        version = entry.admitted_version
        await self._router.wait_for_version(version)
        self._state.buffer.start(entry.group_id)
        group = await self._rollouter.run_group(
            entry.group_id,
            entry.problem,
            size=self._settings.group_size,
            seed=self._settings.seed,
            temperature=self._settings.temperature,
            attempt=entry.resamples,
            min_version=version,
            recorded=self._take_recorded(entry),
            on_rollout=lambda _: self._state.changed(),
            on_turn=self._on_turn,
            on_discard=self._discard_of_rollout,
        )
        self._on_group_ended(entry.group_id)
        self._sort(entry, group)
        self._state.changed()

    def _sort(self, entry: Entry, group: RolloutGroup) -> None:
        """Into the batch, or out: groups whose rewards do not differ teach nothing."""
        buffer, settings = self._state.buffer, self._settings
        is_resampled = settings.zero_variance == "resample"
        is_last_try = is_resampled and entry.resamples >= settings.max_resamples
        if settings.zero_variance == "train" or is_last_try or _teaches(group):
            self._skipped_in_a_row = 0
            buffer.finish(group)
            return
        cause = "resampled" if is_resampled else "zero_variance"
        self._ledger.discard(group.group_id, cause)
        buffer.discard(group.group_id, cause)
        if is_resampled:
            self._resample(entry)
            return
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= settings.max_skipped:
            raise TorchtitanRLError(
                f"{self._skipped_in_a_row} groups in a row had rewards that do not differ, and "
                "schedule.zero_variance is skip: the problems are all solved or all too hard; see "
                "the rewards in rollouts.jsonl, or give schedule.zero_variance train"
            )

    def _resample(self, entry: Entry) -> None:
        """The same problem with other seeds, as a group of its own."""
        again = self._state.buffer.admit(
            entry.group_id,
            entry.problem,
            version=self._state.version,
            resamples=entry.resamples + 1,
        )
        self._ledger.admit(entry.group_id)
        self._launch(again)

    def _take_recorded(self, entry: Entry) -> Mapping[str, RecordedRollout]:
        """What an earlier life of the run had of this group; its tokens enter the account here."""
        rollouts, rolled_back = self._recorded.take(
            entry.group_id, admitted_version=entry.admitted_version
        )
        self._ledger.lose(entry.group_id, "rolled_back", rolled_back)
        kept = sum(recorded.num_tokens for recorded in rollouts.values())
        self._ledger.generate(entry.group_id, kept)
        return rollouts

    def _discard_of_rollout(self, rollout_id: str, cause: str, num_tokens: int) -> None:
        self._ledger.discard_tokens(group_of(rollout_id), cause, num_tokens)


def _teaches(group: RolloutGroup) -> bool:
    """Failed groups are kept: the batcher counts them by the way they failed."""
    rewards = {rollout.reward for rollout in group.rollouts if rollout.reward is not None}
    return len(rewards) != 1
