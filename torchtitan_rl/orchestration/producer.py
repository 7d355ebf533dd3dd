"""The generating side: admits problems while there is room, rolls them out, sorts what comes back.

Invariants: an admitted group ends finished in the buffer or discarded with a cause, whatever its
environment does; a group that was restored goes first; a group is rolled out only by replicas that
hold at least the version it was admitted at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.orchestration.recovery import RecordedGroups
from torchtitan_rl.orchestration.run_state import RunState
from torchtitan_rl.orchestration.turns import Turns
from torchtitan_rl.orchestration.work_buffer import Entry, GroupState
from torchtitan_rl.rollout.recorded import RecordedRollout
from torchtitan_rl.rollout.rollout_run import OnTurn, RolloutActivity
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.rollout.task import Dataset
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import Problem, Rollout, RolloutGroup


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
    """Runs beside the trainer; `restart` is called by it."""

    def __init__(
        self,
        settings: ProducerSettings,
        state: RunState,
        *,
        dataset: Dataset,
        rollouter: Rollouter,
        router: GeneratorRouter,
        turns: Turns,
        recorded: RecordedGroups,
        on_turn: OnTurn,
    ) -> None:
        self._settings = settings
        self._state = state
        self._dataset = dataset
        self._rollouter = rollouter
        self._router = router
        self._turns = turns
        self._recorded = recorded
        self._on_turn = on_turn
        self._ledger = state.ledger
        self._running: dict[str, asyncio.Task[None]] = {}
        self._skipped_in_a_row = 0

    async def run(self) -> None:
        """Keep the buffer full until cancelled.

        Raises:
            TorchtitanRLError: the dataset has ended, or no group is worth training on.
        """
        async with asyncio.TaskGroup() as self._tasks:
            for entry in self._state.buffer.entries:
                if entry.state is GroupState.WAITING:
                    self._launch(entry)
            while True:
                await self._state.until(self._may_admit, "the dataset waits for room in the buffer")
                self._admit(self._next_problem())

    async def restart(self, group_ids: tuple[str, ...]) -> None:
        """Give up what these groups sampled and roll them out again at the current version."""
        for name in await self._stop(group_ids):
            self._ledger.discard_tokens(name, "restarted", self._ledger.tokens_of(name))
            self._launch(self._state.buffer.restart(name, version=self._state.version))
        self._state.changed()

    async def give_up(self, group_ids: tuple[str, ...]) -> None:
        """The run is over; these groups will not be trained."""
        for name in await self._stop(group_ids):
            self._ledger.discard(name, "run_ended")
            self._state.buffer.discard(name, "run_ended")

    async def _stop(self, group_ids: tuple[str, ...]) -> list[str]:
        """End what still runs of these groups and enter every token of it into the ledger.

        Returns those that are still there: meanwhile one may end and be skipped or sampled again.
        """
        entries = [entry for entry in self._state.buffer.entries if entry.group_id in group_ids]
        running = [self._running[name] for name in group_ids if name in self._running]
        if not running:
            return [entry.group_id for entry in entries]
        # No token may be sampled between the reading and the abort.
        is_sampling = not self._turns.engines_are_empty
        if is_sampling:
            await self._router.pause("keep")
        partials = await self._router.partials()
        for task in running:
            task.cancel()
        await asyncio.wait(running)  # their rollouts enter their whole turns
        if is_sampling:
            await self._router.resume()
        live = {id(entry) for entry in self._state.buffer.entries}
        still = [entry.group_id for entry in entries if id(entry) in live]
        for request_id, partial in partials.items():
            group_id = _group_of(request_id)
            if group_id in still:
                self._ledger.generate(group_id, len(partial.token_ids))
        return still

    def activities(self) -> Sequence[RolloutActivity]:
        """What each unfinished rollout does."""
        return self._rollouter.activities()

    def _may_admit(self) -> bool:
        buffer, settings = self._state.buffer, self._settings
        wanted = settings.num_groups + settings.surplus
        is_over = buffer.trained >= settings.num_groups
        return buffer.has_room and not is_over and buffer.trained + len(buffer) < wanted

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
        entry = self._state.buffer.admit(group_id, problem, version=self._state.version)
        self._ledger.admit(group_id)
        self._launch(entry)
        self._state.changed()

    def _launch(self, entry: Entry) -> None:
        task = self._tasks.create_task(self._roll_out(entry), name=f"group {entry.group_id}")
        self._running[entry.group_id] = task
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        # A resampled group's next task has its id already.
        self._running = {name: one for name, one in self._running.items() if one is not task}

    async def _roll_out(self, entry: Entry) -> None:
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
            on_rollout=self._rollout_ended,
            on_turn=self._on_turn,
            on_discard=self._rollout_discarded,
        )
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
        """What a run that was ended had of this group."""
        rollouts, rolled_back = self._recorded.take(
            entry.group_id, admitted_version=entry.admitted_version
        )
        self._discard_tokens(entry.group_id, "rolled_back", rolled_back)
        return rollouts

    def _rollout_ended(self, rollout: Rollout) -> None:
        self._ledger.generate(rollout.group_id, rollout.num_sampled_tokens)
        self._state.changed()

    def _rollout_discarded(self, rollout_id: str, cause: str, num_tokens: int) -> None:
        self._discard_tokens(rollout_id.rsplit("/", 1)[0], cause, num_tokens)

    def _discard_tokens(self, group_id: str, cause: str, num_tokens: int) -> None:
        if num_tokens:
            self._ledger.generate(group_id, num_tokens)
            self._ledger.discard_tokens(group_id, cause, num_tokens)


def _teaches(group: RolloutGroup) -> bool:
    """Failed groups are kept: the batcher counts them by the way they failed."""
    rewards = {rollout.reward for rollout in group.rollouts if rollout.reward is not None}
    return len(rewards) != 1


def _group_of(request_id: str) -> str:
    """The group in ``{group}/r{sibling}/t{turn}``."""
    return request_id.rsplit("/", 2)[0]
