"""Simulated whole runs: equal to a plain loop, within the staleness bound, no token lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fast.orchestration.runs import failing, live, run
from tests.fast.orchestration.test_checkpointing import NothingToTrain
from tests.support.simulated_parts import SimEnv, SimTeacher
from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.distillation.config import TeacherConfig
from torchtitan_rl.errors import (
    DeadlineError,
    NothingTrainedError,
    TeacherError,
    TorchtitanRLError,
    TrainerLostError,
)
from torchtitan_rl.generation.commands import Pause
from torchtitan_rl.orchestration.consumer import StopRequested
from torchtitan_rl.orchestration.controller import Controller
from torchtitan_rl.orchestration.fixed_policy import FixedPolicy
from torchtitan_rl.orchestration.ledger import require_sums
from torchtitan_rl.rollout.env import Observation
from torchtitan_rl.training.batch import StepOutput, TrainingBatch


def reference_weights(plan: Plan, root: Path) -> int:
    """What a plain loop arrives at: roll out, pack, train, bring the weights over; again."""

    async def work() -> int:
        parts = Simulation(plan, root)
        for _ in range(plan.num_steps):
            groups = []
            for _ in range(plan.groups_per_step):
                problem = parts.dataset.next()
                groups.append(
                    await parts.rollouter.run_group(
                        f"e{parts.dataset.epoch}/{problem.problem_id}",
                        problem,
                        size=plan.group_size,
                        seed=plan.seed,
                    )
                )
            batch = parts.batcher(groups).batch
            assert batch is not None
            await parts.trainer.train_step(batch)
            handle = await parts.trainer.publish()
            await parts.router.sync_weights(handle, mode="hot_swap")
        return parts.trainer.weights

    return run_virtually(work())


def test_trap_26_staleness_0_equals_a_plain_synchronous_loop_bit_for_bit(tmp_path: Path) -> None:
    plan = Plan(num_steps=6)
    simulation = run(plan, tmp_path / "run")
    assert simulation.trainer.weights == reference_weights(plan, tmp_path / "plain")
    assert all(
        (batch.versions[batch.loss_mask] == step).all()
        for step, batch in enumerate(simulation.trainer.batches)
    )


def test_fewer_rollouts_at_the_same_time_train_the_same_in_more_time(tmp_path: Path) -> None:
    plan = Plan(num_steps=4)
    whole = run(plan, tmp_path / "whole").trainer
    for number in (1, 4):
        limited = run(replace(plan, max_rollouts=number), tmp_path / f"{number}").trainer
        assert limited.weights == whole.weights


def test_evaluation_alongside_training_does_not_change_what_is_trained(tmp_path: Path) -> None:
    plan = Plan(num_steps=5)
    evaluated = replace(plan, validate_every=2, evaluation_problems=3)
    simulation = run(evaluated, tmp_path / "evaluated")
    assert simulation.trainer.weights == run(plan, tmp_path / "plain").trainer.weights
    records = simulation.recorder.evaluations
    assert [(record.step, record.version) for record in records] == [(0, 0), (2, 2), (4, 4), (5, 5)]
    for record in records:
        versions = {
            version
            for group in record.groups
            for rollout in group.rollouts
            for turn in rollout.turns
            for version in turn.completion.versions
        }
        assert versions == {record.version}


def test_a_reserved_replica_answers_evaluations_alone_at_their_versions(tmp_path: Path) -> None:
    plan = Plan(num_steps=6, staleness=1, validate_every=2, evaluation_problems=4, reserves=True)
    simulation = run(plan, tmp_path)
    validated = simulation.recorder.evaluations
    assert [record.step for record in validated] == [0, 2, 4, 6]
    assert [record.version for record in validated] == [0, 2, 4, 6]
    training, reserved = simulation.replicas
    assert all(name.startswith("validation/") for name in reserved.requested)
    assert not any(name.startswith("validation/") for name in training.requested)


def test_generation_overlaps_training_from_staleness_1_on(tmp_path: Path) -> None:
    def seconds(plan: Plan) -> float:
        async def work() -> float:
            await Simulation(plan, tmp_path / str(plan.staleness)).run()
            return asyncio.get_running_loop().time()

        return run_virtually(work())

    plan = Plan(num_steps=20, train_s=3.0)
    assert seconds(replace(plan, staleness=1)) < 0.8 * seconds(plan)


def test_tokens_that_the_loss_masked_are_in_the_account_as_masked(tmp_path: Path) -> None:
    def prepare(simulation: Simulation) -> None:
        original = simulation.trainer.train_step

        async def masks_a_half(batch: TrainingBatch, **options: Any) -> StepOutput:
            return replace(await original(batch, **options), metrics={"masked_share": 0.5})

        simulation.trainer.train_step = masks_a_half  # type: ignore[method-assign]

    simulation, error = live(Plan(), tmp_path, prepare=prepare)
    assert error is None
    totals = simulation.ledger.totals()
    require_sums(totals)
    assert abs(totals.tokens_masked["loss_mask"] - totals.tokens_trained) <= Plan().num_steps


def test_aborted_groups_go_on_from_their_tokens_under_the_new_weights(tmp_path: Path) -> None:
    plan = Plan(num_steps=8, staleness=1, window=0.34, during_step="aborted", turns=1)
    simulation = run(plan, tmp_path)
    mixed = [
        turn.completion
        for record in simulation.recorder.steps
        for group in record.groups
        for rollout in group.rollouts
        for turn in rollout.turns
        if len(turn.completion.version_runs) > 1
    ]
    assert mixed
    totals = simulation.recorder.steps[-1].totals
    assert totals is not None
    assert not totals.tokens_discarded


def test_trap_19_problems_that_are_all_solved_end_the_run_with_a_message_where_they_are_skipped(
    tmp_path: Path,
) -> None:
    with pytest.raises(TorchtitanRLError, match="rewards that do not differ"):
        run(Plan(reward_levels=1, zero_variance="skip", max_empty_batches=2), tmp_path)


TURN_REWARDS = Plan(reward_levels=1, turn_reward_levels=3, num_steps=3)


def test_groups_that_differ_in_the_rewards_of_turns_alone_are_flat_by_outcome_and_not_by_turn(
    tmp_path: Path,
) -> None:
    skipping = replace(TURN_REWARDS, zero_variance="skip", max_empty_batches=2)
    with pytest.raises(TorchtitanRLError, match="rewards that do not differ"):
        run(skipping, tmp_path / "outcome")
    simulation = run(replace(skipping, credit="turn"), tmp_path / "turn")
    assert simulation.trainer.version == 3
    assert all(record.flat == frozenset() for record in simulation.recorder.steps)
    assert all(batch.advantages.any() for batch in simulation.trainer.batches)
    flat = run(TURN_REWARDS, tmp_path / "flat").recorder.steps
    assert [len(record.flat) for record in flat] == [3, 3, 3]


@pytest.mark.parametrize(("advantage", "times"), [("mean", 1), ("none", 0)])
def test_rewards_of_turns_that_are_not_trained_on_are_named_once_unless_no_reward_is(
    advantage: str, times: int, tmp_path: Path
) -> None:
    plan = replace(TURN_REWARDS, turns=2, advantage=advantage, teacher_s=0.5)
    said = run(plan, tmp_path).recorder.said
    assert sum("turns have rewards of their own" in text for text in said) == times


def test_trap_19_problems_that_are_all_solved_are_trained_on_with_a_word_otherwise(
    tmp_path: Path,
) -> None:
    simulation = run(Plan(num_steps=3, reward_levels=1), tmp_path)
    assert simulation.trainer.version == 3
    assert sum("no group has rewards that differ" in said for said in simulation.recorder.said) == 3


def test_an_environment_that_always_fails_ends_the_run_with_a_message(tmp_path: Path) -> None:
    plan = Plan(env_fails=1.0, turns=1, staleness=1)
    simulation, error = live(plan, tmp_path)
    assert isinstance(error, NothingTrainedError)
    assert "first two steps failed for one cause (12 of 12 rollouts failed: env_" in str(error)
    assert simulation.checkpoints.steps() == [2]
    assert simulation.recorder.steps[-1].step == 2
    simulation, error = live(plan, tmp_path, resume=True)
    assert isinstance(error, NothingTrainedError)
    assert "no step of the run had a token to train on" in str(error)
    assert simulation.checkpoints.steps()[-1] == plan.num_steps


def test_steps_without_a_token_to_train_on_end_the_run_whatever_their_causes(
    tmp_path: Path,
) -> None:
    plan = Plan(num_steps=3)
    for most, said in ((2, "2 steps in a row had no"), (9, "no step of the run had a")):
        root = tmp_path / str(most)
        for resume in (False, most == 9):
            simulation, error = live(
                replace(plan, max_empty_batches=most), root, resume=resume, prepare=without_tokens
            )
            assert isinstance(error, NothingTrainedError)
            assert str(error).startswith(f"{said} token to train on; see")
        assert simulation.checkpoints.steps()[-1] == min(most, 3)


def without_tokens(simulation: Simulation) -> None:
    object.__setattr__(simulation.controller._parts, "batcher", NothingToTrain())


def test_a_run_in_which_nothing_moves_says_who_waits_and_ends(tmp_path: Path) -> None:
    async def work() -> None:
        simulation = Simulation(Plan(max_wait_s=50.0), tmp_path)
        for replica in simulation.replicas:
            await replica.execute(Pause("keep"))
        await simulation.run()

    with pytest.raises(DeadlineError, match=r"the trainer waits for the batch of step 1"):
        run_virtually(work())


@pytest.mark.parametrize("after_s", [0.5, 30.0])
def test_a_trainer_that_dies_while_nobody_calls_it_ends_the_run_at_once(
    tmp_path: Path, after_s: float
) -> None:
    plan = Plan(num_steps=4)

    async def work() -> BaseException | None:
        simulation = Simulation(replace(plan, token_s=100.0), tmp_path / "run")  # a turn: 1,000 s
        running = asyncio.create_task(simulation.run())
        asyncio.get_running_loop().call_later(after_s, simulation.trainer.lose)
        done, _ = await asyncio.wait({running}, timeout=after_s + 400.0)
        assert done, "the run goes on without a trainer"
        assert not simulation.trainer.batches
        return running.exception()

    assert isinstance(run_virtually(work()), TrainerLostError)
    whole = run(plan, tmp_path / "whole")
    assert run(plan, tmp_path / "run", resume=True).trainer.weights == whole.trainer.weights


def test_a_run_that_is_cancelled_again_while_it_closes_closes_every_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, closed = [], []
    reset = SimEnv.reset

    async def opens(env: SimEnv) -> Observation:
        opened.append(env)
        return await reset(env)

    async def closes(env: SimEnv) -> None:
        await asyncio.sleep(20.0)
        closed.append(env)

    async def work() -> None:
        simulation = Simulation(Plan(), tmp_path)
        running = asyncio.create_task(simulation.run())
        for _ in range(3):
            await asyncio.sleep(2.0)
            running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert simulation.rollouter.activities() == []

    monkeypatch.setattr(SimEnv, "reset", opens)
    monkeypatch.setattr(SimEnv, "close", closes)
    run_virtually(work())
    assert len(opened) == len(closed) > 0


@pytest.mark.parametrize(
    ("during_step", "staleness", "seconds", "advantage"),
    [
        ("running", 0, (4.4, 0.7), "mean"),
        ("running", 0, (4.4, 0.7), "pair"),
        ("running", 2, (14.2, 0.2, 5.0), "mean"),
        ("asleep", 1, (0.7,), "mean"),
    ],
)
def test_trap_28_a_killed_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, seconds: tuple[float, ...], during_step: str, staleness: int, advantage: str
) -> None:
    plan = Plan(
        num_steps=8,
        checkpoint_every=3,
        staleness=staleness,
        turns=3,
        during_step=during_step,
        advantage=advantage,
    )
    for attempt, after in enumerate(seconds):
        live(plan, tmp_path / "cut", kill_after=after, resume=attempt > 0)
    resumed = run(plan, tmp_path / "cut", resume=True)
    whole = run(plan, tmp_path / "whole")
    assert resumed.trainer.version == 8
    assert resumed.dataset.state_dict() == whole.dataset.state_dict()
    for one in (resumed, whole):
        require_sums(one.ledger.totals())
    assert resumed.ledger.groups_trained == whole.ledger.groups_trained == 24
    assert resumed.ledger.groups_admitted == whole.ledger.groups_admitted
    if staleness == 0:
        assert resumed.trainer.weights == whole.trainer.weights


def test_trap_28_a_turn_that_was_finished_is_not_sampled_again_after_a_kill(tmp_path: Path) -> None:
    plan = Plan(num_steps=4, staleness=1, turns=3)
    killed, _ = live(plan, tmp_path, kill_after=4.0)
    finished = {one.request_id for one in killed.answered if set(one.versions) == {0}}
    assert len(finished) > 10
    resumed = run(plan, tmp_path, resume=True)
    assert not finished & set(resumed.requested)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_teacher_that_fails_ends_the_run_and_nothing_is_lost(
    staleness: int, tmp_path: Path
) -> None:
    plan = Plan(staleness=staleness, turns=2, teacher_s=0.5, reward_levels=1)
    fails = failing("score", 9, TeacherError("gone"), of="teacher", forever=True)
    cut, error = live(plan, tmp_path / "cut", prepare=fails)
    assert isinstance(error, TeacherError)
    finished = {one.request_id for one in cut.answered}
    resumed = run(plan, tmp_path / "cut", resume=True)
    assert not finished & set(resumed.requested)
    whole = run(plan, tmp_path / "whole")
    totals = resumed.ledger.totals()
    require_sums(totals)
    if staleness == 0:
        assert resumed.trainer.weights == whole.trainer.weights
    assert not totals.tokens_discarded
    # The rewards do not differ, so that the teacher alone trains.
    for batch in resumed.trainer.batches:
        tokens = batch.token_ids[batch.loss_mask].tolist()
        expected = np.array([*map(SimTeacher.logprob, tokens)]) - batch.logprobs[batch.loss_mask]
        assert batch.advantages[batch.loss_mask] == pytest.approx(expected, abs=1e-6)


def test_a_slow_teacher_keeps_groups_within_the_bound_of_staleness(tmp_path: Path) -> None:
    plan = Plan(staleness=1, num_steps=8, teacher_s=30.0, zero_variance="skip", reward_levels=1)
    simulation = run(plan, tmp_path)
    assert max(simulation.trainer.ages) == 1
    assert simulation.ledger.groups_trained == 24


def taught_in_the_trainer(simulation: Simulation) -> None:
    teacher = TeacherConfig(checkpoint="teacher", loss="full")
    batcher = replace(simulation.batcher, teacher=teacher)
    parts = replace(simulation.controller._parts, batcher=batcher)
    simulation.controller = Controller(replace(simulation.config, teacher=teacher), parts)


def test_groups_that_a_teacher_in_the_trainer_teaches_need_no_rewards_that_differ(
    tmp_path: Path,
) -> None:
    plan = Plan(num_steps=3, zero_variance="skip", reward_levels=1)
    simulation, error = live(plan, tmp_path, prepare=taught_in_the_trainer)
    assert error is None
    assert simulation.trainer.version == 3
    for batch in simulation.trainer.batches:
        assert not batch.advantages.any()
        assert not batch.teachers.any()
        assert batch.teacher_coefficient == 1.0
    assert not any("no group has rewards" in said for said in simulation.recorder.said)


def only_generating(simulation: Simulation) -> None:
    parts = replace(simulation.controller._parts, trainer=FixedPolicy())
    simulation.controller = Controller(replace(simulation.config, mode="generate"), parts)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_only_generates_goes_on_from_its_checkpoint_and_counts_every_token(
    staleness: int, tmp_path: Path
) -> None:
    plan = Plan(staleness=staleness, checkpoint_every=2)
    whole, error = live(plan, tmp_path / "whole", prepare=only_generating)
    assert error is None
    _, error = live(plan, tmp_path / "cut", prepare=only_generating, stop_after=6.0)
    assert isinstance(error, StopRequested)
    resumed, error = live(plan, tmp_path / "cut", prepare=only_generating, resume=True)
    assert error is None
    records = {one.step: one for one in [*whole.recorder.steps, *resumed.recorder.steps]}
    assert max(records) == plan.num_steps
    for record in records.values():
        assert (record.version, record.tokens.trained, record.episodes) == (0, 0, ())
        assert record.totals is not None
        require_sums(record.totals)
        assert record.totals.tokens_discarded["only_generated"] > 0
    if staleness == 0:
        last = whole.recorder.steps[-len(resumed.recorder.steps) :]
        assert [one.groups for one in resumed.recorder.steps] == [one.groups for one in last]
