"""Whatever fails, the newest checkpoint is a state that every invariant holds of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fast.orchestration.runs import failing, live, run
from tests.support.simulation import Plan, Simulation
from torchtitan_rl.errors import (
    CheckpointError,
    OutputError,
)
from torchtitan_rl.orchestration.batching import Batched
from torchtitan_rl.orchestration.checkpointing import SavedRun, read_saved_run
from torchtitan_rl.orchestration.consumer import StopRequested
from torchtitan_rl.orchestration.journal import JOURNAL, Journal, JournalError
from torchtitan_rl.orchestration.records import TokenCounts
from torchtitan_rl.orchestration.work_buffer import GroupState
from torchtitan_rl.types import FinishReason, RolloutGroup

PLAN = Plan(num_steps=6, turns=3, checkpoint_every=2)


def newest(simulation: Simulation) -> SavedRun:
    """What the controller saved in the newest checkpoint."""
    path = simulation.checkpoints.choose(lambda _: None).path
    assert path is not None
    return read_saved_run(path)


def end_dataset(simulation: Simulation, *, after: int) -> None:
    """Let it end after so many problems."""
    original, left = simulation.dataset.next, [after]

    def ends() -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise StopIteration
        return original()

    simulation.dataset.next = ends  # type: ignore[method-assign]


fail_every_save = failing("save_checkpoint", 1, CheckpointError("no space"), forever=True)


def test_a_run_goes_on_without_its_journal_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, left = Journal.append, [20]

    def full(journal: Journal, *line: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise JournalError("no space")
        original(journal, *line)

    monkeypatch.setattr(Journal, "append", full)
    simulation = run(replace(PLAN, staleness=1), tmp_path)
    assert sum("NO JOURNAL" in text for text in simulation.recorder.said) == 1


@pytest.mark.parametrize(("kind", "number"), [("record_step", 3), ("record_account", 2)])
def test_a_row_that_cannot_be_written_is_written_before_the_next_one(
    tmp_path: Path, kind: str, number: int
) -> None:
    plan = replace(PLAN, validate_every=2, evaluation_problems=2)

    def prepare(simulation: Simulation) -> None:
        original, left = getattr(simulation.recorder, kind), [number]

        def full(record: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise OutputError("no space")
            original(record)

        setattr(simulation.recorder, kind, full)

    simulation, error = live(plan, tmp_path, prepare=prepare)
    assert error is None
    assert [record.step for record in simulation.recorder.steps] == [1, 2, 3, 4, 5, 6]
    assert [record.step for record in simulation.recorder.evaluations] == [0, 2, 4, 6]
    assert [record.step for record in simulation.recorder.accounts] == [2, 4, 6]
    assert any("1 rows could not be written" in text for text in simulation.recorder.said)


def test_no_checkpoint_is_taken_while_a_row_waits(tmp_path: Path) -> None:
    def prepare(simulation: Simulation) -> None:
        original = simulation.recorder.record_step

        def full(record: Any) -> None:
            if record.step == 4:
                raise OutputError("no space")
            original(record)

        simulation.recorder.record_step = full  # type: ignore[method-assign]

    first, error = live(replace(PLAN, staleness=1), tmp_path, prepare=prepare)
    assert isinstance(error, OutputError)
    assert newest(first).position.step == 2


def test_a_checkpoint_that_is_due_after_a_step_without_an_update_waits_for_shared_devices(
    tmp_path: Path,
) -> None:
    plan = replace(PLAN, during_step="asleep", checkpoint_every=1, env_fails=0.4, chance=9)
    simulation = run(plan, tmp_path)
    (said, *_) = [one for one in simulation.recorder.said if "has no token to train on" in one]
    assert " rollouts failed: env_error: " in said
    assert "the environment failed by chance" in said


@pytest.mark.parametrize("method", ["save_checkpoint", "finish_checkpoint"])
def test_one_checkpoint_that_cannot_be_written_is_reported_and_the_run_goes_on(
    tmp_path: Path, method: str
) -> None:
    prepare = failing(method, 2, CheckpointError("no space"))
    simulation, error = live(replace(PLAN, num_steps=8), tmp_path, prepare=prepare)
    assert error is None
    assert any("NO CHECKPOINT of step 4" in text for text in simulation.recorder.said)
    assert simulation.checkpoints.steps()[-1] == 8


def test_a_finished_run_that_is_resumed_is_neither_evaluated_nor_saved_again(
    tmp_path: Path,
) -> None:
    plan = replace(PLAN, validate_every=3, evaluation_problems=2)
    run(plan, tmp_path)
    second, error = live(plan, tmp_path, resume=True, prepare=fail_every_save)
    assert error is None
    assert second.recorder.evaluations == []


def test_a_run_that_stops_after_a_checkpoint_saves_what_its_rollouts_have_sampled_since(
    tmp_path: Path,
) -> None:
    plan = replace(PLAN, staleness=2, checkpoint_every=1, env_delay_s=5.0)

    def prepare(simulation: Simulation) -> None:
        recorder = simulation.recorder
        original = recorder.record_account

        def stops(record: Any) -> None:  # a checkpoint has just been taken
            original(record)
            asyncio.get_running_loop().call_later(3.0, simulation.controller.request_stop)

        recorder.record_account = stops  # type: ignore[method-assign]

    simulation, error = live(plan, tmp_path, prepare=prepare)
    assert isinstance(error, StopRequested)
    saved = newest(simulation)
    assert saved.position.journal_mark == 1  # the second checkpoint of its step
    assert any(rollout.partial for rollout in saved.rollouts.values())


@pytest.mark.parametrize(("staleness", "is_cut"), [(0, False), (2, True)])
def test_running_turns_are_saved_unless_they_have_to_be_sampled_again_bit_for_bit(
    tmp_path: Path, staleness: int, is_cut: bool
) -> None:
    simulation, error = live(replace(PLAN, staleness=staleness), tmp_path, stop_after=1.0)
    assert isinstance(error, StopRequested)
    partials = [rollout.partial for rollout in newest(simulation).rollouts.values()]
    found = [one.finish_reason is FinishReason.ABORT for one in partials if one is not None]
    assert found
    assert any(found) == is_cut


def test_the_batch_of_a_failed_step_is_saved_and_trained_by_the_resumed_run(tmp_path: Path) -> None:
    plan = replace(PLAN, staleness=1)
    first, error = live(plan, tmp_path, prepare=failing("train_step", 4, ValueError("a loss")))
    assert isinstance(error, ValueError)
    saved = newest(first)
    batch = [one.group_id for one in saved.entries if one.state is GroupState.FINISHED]
    assert saved.position.step == 3
    second = run(plan, tmp_path, resume=True)
    assert {group.group_id for group in second.recorder.steps[0].groups} <= set(batch)


@pytest.mark.parametrize(("method", "last"), [("save_checkpoint", 3), ("finish_checkpoint", 4)])
def test_a_run_whose_checkpoints_all_fail_ends_after_so_many(
    tmp_path: Path, method: str, last: int
) -> None:
    plan = replace(PLAN, num_steps=20, checkpoint_every=1)
    prepare = failing(method, 1, CheckpointError("no space"), forever=True)
    simulation, error = live(plan, tmp_path, prepare=prepare)
    assert isinstance(error, CheckpointError)
    assert "3 checkpoints in a row" in str(error)
    assert sum("NO CHECKPOINT" in text for text in simulation.recorder.said) == 3
    assert simulation.controller.step == last


def test_recorded_turns_of_groups_that_were_not_admitted_again_outlive_a_second_checkpoint(
    tmp_path: Path,
) -> None:
    plan = replace(PLAN, staleness=2, checkpoint_every=0)
    live(plan, tmp_path, kill_after=6.0)
    journal = Journal(tmp_path / JOURNAL)
    before = journal.restore(0, {})
    # The next life admits three groups only, and saves at the same step.
    second, error = live(plan, tmp_path, resume=True, prepare=partial(end_dataset, after=3))
    assert "the dataset ended" in str(error)
    saved = newest(second)
    held = {entry.group_id for entry in saved.entries}
    later = [name for name in before if name.rsplit("/", 1)[0] not in held]
    assert later
    assert saved.position.step == 0
    found = journal.restore(0, {}, mark=saved.position.journal_mark)
    assert {name: found[name].turns for name in later} == {n: before[n].turns for n in later}


def test_recorded_turns_outlive_a_run_that_is_resumed_with_no_steps_left(tmp_path: Path) -> None:
    plan = replace(PLAN, staleness=2, env_delay_s=1.0)
    before = newest(live(plan, tmp_path, kill_after=15.0)[0])
    second = run(replace(plan, num_steps=before.position.step), tmp_path, resume=True)
    after = newest(second)
    assert after.position.journal_mark == 1
    turns = {name: rollout.turns for name, rollout in before.rollouts.items()}
    assert any(turns.values())
    assert {name: after.rollouts[name].turns[: len(turns[name])] for name in turns} == turns


class NothingToTrain:
    """A batcher that finds no token to train on, without an await of the consumer's."""

    def __call__(self, groups: Sequence[RolloutGroup]) -> Batched:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        number = sum(rollout.num_sampled_tokens for rollout in rollouts)
        counts = TokenCounts(generated=number, trained=0, discarded={"env_error": number})
        return Batched(None, counts, ())


def test_the_last_rows_and_the_last_evaluation_are_in_the_files_or_the_run_fails(
    tmp_path: Path,
) -> None:
    plan = replace(PLAN, checkpoint_every=1, validate_every=3, evaluation_problems=2)
    simulation = run(plan, tmp_path / "sound")
    assert newest(simulation).position.evaluated_step == plan.num_steps

    def prepare(simulation: Simulation) -> None:
        original = simulation.recorder.record_evaluation

        def full(record: Any) -> None:
            if record.step == plan.num_steps:
                raise OutputError("no space")
            original(record)

        simulation.recorder.record_evaluation = full  # type: ignore[method-assign]

    _, error = live(plan, tmp_path / "full", prepare=prepare)
    assert isinstance(error, OutputError)
