"""The long-tailed answers, and what is read from the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.long_tail import MODES, PLAIN, Counted, counted_steps, figures_of
from benchmarks.long_tail_run import FinishedRun
from benchmarks.long_tail_work import LongTail
from torchtitan_rl.orchestration.capacity import capacity_errors
from torchtitan_rl.orchestration.records import LedgerTotals, StepRecord, TokenCounts
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    Problem,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Turn,
    VersionRun,
)

TAIL = LongTail(groups_per_step=4, group_size=2, median=16, long_share=0.25)


def test_every_mode_is_a_valid_schedule_and_counts_whole_bursts_behind_the_first() -> None:
    assert (MODES[PLAIN].staleness, MODES[PLAIN].window) == (0, 0.0)
    for schedule in MODES.values():
        assert not capacity_errors(
            groups_per_step=8, staleness=schedule.staleness, window=schedule.window
        )
        burst = schedule.staleness + 1
        counted = counted_steps(schedule, 10)
        assert counted.number % burst == 0
        assert 10 <= counted.number < 10 + burst
        assert counted.first > max(burst, 2)


def test_age_length_and_waste_are_of_the_measured_steps_alone() -> None:
    steps = [_step(n, [n - 1], restarted=10 * n) for n in range(1, 5)]
    figures = figures_of(
        FinishedRun(steps=tuple(steps), mean_batch=3.0), TAIL, Counted(first=2, last=3)
    )
    lengths = [*TAIL.lengths(1), *TAIL.lengths(2)]
    assert figures["length_mean"] == sum(lengths) / 4
    assert figures["length_max"] == max(lengths)
    assert figures["long_per_step"] == sum(map(TAIL.is_long, lengths)) / 2
    # The first token of each is one version old, the others are of the weights that were trained.
    assert figures["age_max"] == 1
    assert figures["age_mean"] == pytest.approx(4 / sum(lengths))
    assert figures["groups_per_second"] == pytest.approx(2 / 4.0)
    assert figures["rollout_s"] == 1.5
    assert figures["tokens"]["trained"] == sum(lengths)
    assert figures["tokens"]["thrown_away"] == 20
    assert figures["tokens"]["by_cause"] == {"restarted": 20}


def _step(number: int, indexes: Sequence[int], *, restarted: int) -> StepRecord:
    """Trained from version ``number`` - 1; the ledger's totals are those of all steps so far."""
    trained = sum(sum(TAIL.lengths(index)) for index in range(number))
    return StepRecord(
        step=number,
        version=number,
        groups=tuple(_group(index, number) for index in indexes),
        tokens=TokenCounts(generated=0, trained=0),
        trainer={},
        publish_s=0.1,
        rollout_s=1.5,
        train_s=0.4,
        wall_s=2.0,
        totals=LedgerTotals(
            tokens_generated=trained + restarted,
            tokens_trained=trained,
            tokens_masked={},
            tokens_discarded={"restarted": restarted, "zero": 0},
            tokens_buffered=0,
            groups_admitted=number,
            groups_trained=number,
            groups_discarded={},
            groups_buffered=0,
        ),
    )


def _group(index: int, step: int) -> RolloutGroup:
    rollouts = []
    for sibling, length in enumerate(TAIL.lengths(index)):
        name = f"e0/{index}/r{sibling}"
        runs = [VersionRun(0, step - 2), VersionRun(1, step - 1)]
        turn = Turn(prompt_token_ids=(1,), completion=_completion(f"{name}/t0", length, runs))
        rollouts.append(
            Rollout(
                rollout_id=name,
                group_id=f"e0/{index}",
                problem_id=str(index),
                turns=(turn,),
                status=RolloutStatus.COMPLETED,
                reward=1.0,
            )
        )
    problem = Problem(problem_id=str(index), data={})
    return RolloutGroup(group_id=f"e0/{index}", problem=problem, rollouts=tuple(rollouts))


def _completion(request_id: str, length: int, runs: Sequence[VersionRun]) -> Completion:
    return Completion(
        request_id=request_id,
        token_ids=(5,) * length,
        logprobs=(-1.0,) * length,
        version_runs=tuple(runs),
        finish_reason=FinishReason.LENGTH,
    )
