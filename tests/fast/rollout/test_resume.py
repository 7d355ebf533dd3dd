"""Rollouts that are stopped at any moment and continued by another rollouter."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.async_tests import cancel, ticks
from tests.support.resuming import (
    SIZE,
    Counter,
    Replaying,
    Run,
    Saving,
    SeededGenerate,
    contents,
    sampled_tokens,
    stops,
    through_json,
)
from tests.support.rollouts import PROBLEM
from torchtitan_rl.rollout.recorded import RecordedRollout, with_turn
from torchtitan_rl.types import FinishReason, RolloutStatus


@pytest.mark.parametrize("limits", [{}, {"max_turns": 2}, {"max_total_tokens": 9}])
def test_a_replaying_environment_continues_from_any_moment_as_if_undisturbed(limits):
    undisturbed = Run(Replaying, **limits).whole()
    for before, recorded in stops(Replaying, **limits):
        after = Run(Replaying, **limits)
        assert contents(after.whole(recorded)) == contents(undisturbed)
        assert after.discarded == []
        assert after.closed()
        assert before.closed()


def test_finished_turns_are_never_sampled_again_and_never_reported_again():
    for before, recorded in stops(Replaying):
        after = Run(Replaying)
        after.whole(recorded)
        finished = {entry.rollout_id: len(entry.turns) for entry in recorded}
        asked = [request.request_id for request in after.generate.requests]
        for rollout_id, count in finished.items():
            assert not {f"{rollout_id}/t{i}" for i in range(count)} & set(asked)
        everybody = [(f"g/r{i}", turn) for i in range(SIZE) for turn in range(3)]
        assert sorted(before.turns + after.turns) == everybody


def test_tokens_of_the_running_turn_are_kept_as_tokens():
    """What was sampled by both together is what one undisturbed run samples."""
    kept = 0
    for _, recorded in stops(Replaying):
        partials = {e.rollout_id: e.partial for e in recorded if e.partial is not None}
        after = Run(Replaying)
        after.whole(recorded)
        for request in after.generate.requests:
            if request.resume_from is not None:
                kept += 1
                assert request.resume_from == partials[request.session_id]
                assert request.resume_from.finish_reason is FinishReason.ABORT
    assert kept


def test_a_completion_whose_step_was_running_is_stepped_with_and_not_sampled_again():
    seen = 0
    for _, recorded in stops(Replaying):
        whole = [e for e in recorded if e.partial and e.partial.finish_reason is FinishReason.STOP]
        after = Run(Replaying)
        after.whole(recorded)
        asked = {request.request_id for request in after.generate.requests}
        seen += len(whole)
        assert not asked & {entry.partial.request_id for entry in whole}
    assert seen


def test_an_environment_with_a_state_is_loaded_and_neither_reset_nor_stepped_with_old_turns():
    loaded = 0
    for _, recorded in stops(Saving):
        after = Run(Saving)
        group = after.whole(recorded)
        assert after.discarded == []
        assert after.closed()
        for entry, rollout in zip(recorded, group.rollouts, strict=True):
            assert rollout.turns[: len(entry.turns)] == entry.turns
            assert rollout.status is RolloutStatus.COMPLETED
            tokens = sum(sum(turn.completion.token_ids) for turn in rollout.turns)
            assert rollout.reward == 2.0 * tokens
        if all(entry.env_state is not None and not entry.ended for entry in recorded):
            loaded += 1
            assert not any("reset" in env.calls for env in after.factory.made)
    assert loaded


def test_an_environment_that_cannot_be_resumed_starts_again_and_its_tokens_are_discarded():
    undisturbed = Run(Counter).whole()
    lost = 0
    for _, recorded in stops(Counter):
        after = Run(Counter)
        assert contents(after.whole(recorded)) == contents(undisturbed)
        assert after.closed()
        for rollout_id, cause, num_tokens in after.discarded:
            (entry,) = [entry for entry in recorded if entry.rollout_id == rollout_id]
            assert (cause, num_tokens) == ("env_not_resumable", entry.num_tokens)
            assert entry.turns
            lost += 1
    assert lost


def middle_of(*makers, turns=1):
    """The snapshot of a run whose rollouts have so many finished turns."""
    for _, recorded in stops(*makers):
        if all(len(entry.turns) == turns and not entry.ended for entry in recorded):
            return recorded
    raise AssertionError("there was no such moment")


class Different(Replaying):
    """Declares that it replays, but does not."""

    async def reset(self):
        await super().reset()
        self.prompt = (1, 2, 77)
        return await Counter.reset(self)


class EndsEarly(Replaying):
    def __init__(self):
        super().__init__(turns=1)


class CannotReplay(Replaying):
    """Raises in the replay, and works when it starts again."""

    made = 0

    def __init__(self):
        super().__init__()
        CannotReplay.made += 1
        self.raises = CannotReplay.made <= SIZE

    async def step(self, completion):
        if self.raises:
            raise OSError("gone")
        return await super().step(completion)


@pytest.mark.parametrize("maker", [Different, EndsEarly, CannotReplay])
def test_a_replay_that_differs_starts_again(maker):
    recorded = middle_of(Replaying)
    after = Run(maker)
    group = after.whole(recorded)
    assert [d[:2] for d in after.discarded] == [(f"g/r{i}", "env_not_resumable") for i in (0, 1)]
    assert sum(d[2] for d in after.discarded) == sampled_tokens(recorded) > 0
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.COMPLETED}
    assert len(after.factory.made) == 2 * SIZE
    assert after.closed()


def test_a_sibling_that_had_ended_keeps_its_end_and_is_only_scored_again():
    class Fails(Replaying):
        async def step(self, completion):
            raise ValueError("no")

    for _, recorded in stops(Replaying, Fails):
        if recorded[1].ended is None:
            continue
        after = Run(Replaying)
        group = after.whole(recorded)
        assert group.rollouts[1].status is RolloutStatus.ENV_ERROR
        assert "ValueError: no" in group.rollouts[1].cause
        assert len(after.factory.made) == (0 if recorded[0].ended else 1)
        return
    raise AssertionError("there was no such moment")


def test_a_rollout_whose_last_recorded_turn_ended_it_needs_no_environment():
    """As from a journal, which has no `ended`; even where the environment could not resume."""
    run = Run(Counter)
    whole = contents(run.whole())
    recorded = []
    for rollout_id, lines in run.records.items():
        entry = RecordedRollout(rollout_id=rollout_id)
        for index, turn, state in lines:
            entry = with_turn(entry, index, turn, state)
        recorded.append(through_json(entry))
    after = Run(lambda: pytest.fail("an environment was made"))
    assert contents(after.whole(recorded)) == whole
    assert after.turns == []


def test_no_token_is_sampled_under_a_policy_before_the_groups_admission():
    run = Run(Replaying)
    run.whole(min_version=4)
    assert {request.min_version for request in run.generate.requests} == {4}
    assert {request.min_version for request in Run(Replaying).generate.requests} <= {0}


def test_another_attempt_has_other_seeds_and_ids_and_everything_else_the_same():
    first, second = Run(Replaying), Run(Replaying)
    one, two = first.whole(), second.whole(attempt=1)
    ids = [{request.request_id for request in run.generate.requests} for run in (first, second)]
    seeds = [
        {request.sampling.seed for request in run.generate.requests} for run in (first, second)
    ]
    assert not ids[0] & ids[1]
    assert not seeds[0] & seeds[1]
    assert [r.rollout_id for r in one.rollouts] == [r.rollout_id for r in two.rollouts]
    sessions = {request.session_id for request in second.generate.requests}
    assert sessions == {"g/r0", "g/r1"}


def test_what_another_attempt_recorded_is_discarded():
    recorded = middle_of(Replaying)
    after = Run(Replaying)
    assert contents(after.whole(recorded, attempt=1)) == contents(Run(Replaying).whole(attempt=1))
    assert {cause for _, cause, _ in after.discarded} == {"rolled_back"}
    assert sum(tokens for *_, tokens in after.discarded) == sampled_tokens(recorded)


def test_one_call_may_have_another_generator():
    run, other = Run(Replaying), SeededGenerate(version=5)
    group = run.whole(generate=other)
    assert run.generate.requests == []
    versions = {v for r in group.rollouts for t in r.turns for v in t.completion.versions}
    assert versions == {5}


def test_a_snapshot_during_the_restore_is_the_one_that_is_restored():
    recorded = middle_of(Replaying, turns=2)

    async def scenario():
        after = Run(Replaying)
        task = asyncio.create_task(after.start(recorded))
        seen = []
        while not after.generate.requests:
            await asyncio.sleep(0)
            if not after.generate.requests:
                seen.append(after.rollouter.snapshot("g"))
        await cancel(task)
        return seen

    seen = asyncio.run(scenario())
    assert len(seen) > 2
    for snapshot in seen:
        for entry, before in zip(snapshot, recorded, strict=True):
            assert entry.turns == before.turns
            assert entry.num_tokens == before.num_tokens


def test_a_snapshot_inside_on_turn_can_be_resumed():
    run, snapshots = Run(Replaying), []

    def on_turn(*_):
        snapshots.append(tuple(map(through_json, run.rollouter.snapshot("g"))))

    group = asyncio.run(run.rollouter.run_group("g", PROBLEM, size=SIZE, seed=7, on_turn=on_turn))
    assert len(snapshots) == 6
    for recorded in snapshots:
        after = Run(Replaying)
        assert contents(after.whole(recorded)) == contents(group)
        assert after.discarded == []


def test_tokens_of_a_resumed_request_that_still_waits_for_a_replica_are_in_the_snapshot():
    recorded = next(
        entries for _, entries in stops(Replaying) if entries[0].partial and entries[0].turns
    )

    async def waits(request):
        await asyncio.Event().wait()

    async def scenario():
        after = Run(Replaying)
        task = asyncio.create_task(after.start(recorded, generate=waits))
        await ticks()
        snapshot = after.rollouter.snapshot("g", {})
        await cancel(task)
        return snapshot

    assert asyncio.run(scenario())[0].partial == recorded[0].partial


def test_a_rollout_may_be_stopped_again_right_after_it_was_restored():
    recorded = middle_of(Saving, turns=2)
    again = Run(Saving).stopped_after(6, recorded)
    assert [entry.env_state for entry in again] == [entry.env_state for entry in recorded]
    after = Run(Saving)
    after.whole(again)
    assert after.discarded == []


def test_a_group_that_is_started_again_has_its_snapshot_when_the_first_one_ends():
    async def scenario():
        run = Run(Replaying)
        first = asyncio.create_task(run.start())
        await asyncio.sleep(0)
        second = asyncio.create_task(run.start(attempt=1))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait({first})
        snapshot = run.rollouter.snapshot("g")
        await second
        return snapshot

    assert len(asyncio.run(scenario())) == SIZE


def test_a_group_that_does_not_run_has_no_snapshot():
    with pytest.raises(KeyError):
        Run(Replaying).rollouter.snapshot("g")


def test_an_error_of_the_recorder_ends_the_group_and_closes_its_environments():
    run = Run(Replaying)

    def fail(*args):
        raise OSError("disk full")

    group = run.rollouter.run_group("g", PROBLEM, size=2, seed=7, on_turn=fail)
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(group)
    assert caught.group_contains(OSError, match="disk full")
    assert sampled_tokens(run.rollouter.snapshot("g")) > 0  # it can still be saved
    assert run.closed()
    assert run.rollouter.activities() == []


@pytest.mark.parametrize("state", [{1, 2}, object(), float])
def test_a_state_that_is_not_json_ends_the_rollout_with_a_cause(state):
    class Odd(Saving):
        async def state_dict(self):
            return state

    group = Run(Odd).whole()
    assert {rollout.status for rollout in group.rollouts} == {RolloutStatus.ENV_ERROR}
    assert "state_dict: expected JSON-able" in group.rollouts[0].cause


def test_a_state_is_a_copy_that_later_steps_do_not_change():
    run = Run(Saving)
    run.whole()
    states = [state for _, _, state in run.records["g/r0"]]
    assert [len(state.state["sums"]) for state in states[:-1]] == [1, 2]
