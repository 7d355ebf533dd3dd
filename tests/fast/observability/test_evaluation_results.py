"""The numbers, the table and the picture of ``torchtitan-rl eval``."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.fast.observability.test_evaluation import SOLVED, group
from torchtitan_rl.errors import OutputError
from torchtitan_rl.observability.evaluation import (
    Evaluated,
    EvaluationLog,
    Interval,
    draw,
    read_finished,
    result_table,
    results,
    share_interval,
)
from torchtitan_rl.types import Problem, RolloutGroup


def named(groups: list[RolloutGroup], task: str = "") -> tuple[RolloutGroup, ...]:
    """Each of another problem."""
    return tuple(
        replace(one, problem=Problem(problem_id=f"p{number}", data={}, task=task))
        for number, one in enumerate(groups)
    )


BEFORE = Evaluated(
    model="base", temperature=1.0, groups=named([group(1.0, 0.0), group(0.0, 0.0), group(0.5, 1.0)])
)
AFTER = Evaluated(
    model="run/step-000010",
    temperature=1.0,
    groups=named([group(1.0, 1.0), group(0.0, 1.0), group(1.0, None)], task="sums"),
)
ROWS = results([BEFORE, AFTER], success_reward=SOLVED)


def shares(solved: Sequence[float], *, samples: int) -> Interval:
    interval = share_interval(solved, size=samples * len(solved))
    assert interval is not None
    return interval


def test_one_sample_a_problem_gives_wilsons_interval_with_students_t() -> None:
    # 15 of 20: (p + t²/2n ± t sqrt(p(1-p)/n + t²/4n²)) / (1 + t²/n), t = 2.093, n = 19, by hand
    interval = shares([1.0] * 15 + [0.0] * 5, samples=1)
    assert (interval.low, interval.high) == pytest.approx((0.50996, 0.89636), abs=1e-4)


@pytest.mark.parametrize("samples", [1, 4, 64])
def test_where_all_problems_are_solved_the_interval_still_has_a_width(samples: int) -> None:
    # Wilson for n of n: n / (n + t²), t = 2.262
    interval = shares([1.0] * 10, samples=samples)
    assert (interval.low, interval.high) == pytest.approx((10 / (10 + 2.262**2), 1.0), abs=1e-3)


@given(st.lists(st.integers(0, 8), min_size=2, max_size=60))
def test_a_share_is_within_its_interval_and_that_between_0_and_1(solved: list[int]) -> None:
    interval = shares([number / 8 for number in solved], samples=8)
    assert 0.0 <= interval.low <= interval.mean <= interval.high <= 1.0
    assert interval.low < interval.high


@pytest.mark.parametrize(
    ("problems", "samples", "rates"), [(4, 4, (0.2, 0.8)), (8, 1, (0.0, 0.1, 0.4, 0.9))]
)
def test_the_interval_covers_the_truth_at_least_about_as_often_as_it_says(
    problems: int, samples: int, rates: tuple[float, ...]
) -> None:
    rng = random.Random(0)
    covered = 0
    for _ in range(400):
        drawn = [rng.choice(rates) for _ in range(problems)]
        solved = [sum(rng.random() < rate for _ in range(samples)) / samples for rate in drawn]
        interval = shares(solved, samples=samples)
        covered += interval.low <= fmean(rates) <= interval.high
    assert covered / 400 >= 0.91


def test_failed_rollouts_solve_nothing_and_have_no_reward() -> None:
    (_, after) = ROWS
    assert after["failed"] == {"env_error": 1}
    assert after["reward"]["mean"] == pytest.approx((1.0 + 0.5 + 1.0) / 3)
    assert after["avg_at_k"]["mean"] == pytest.approx((1.0 + 0.5 + 0.5) / 3)
    assert {k: v["mean"] for k, v in after["pass_at_k"].items()} == {"1": 2 / 3, "2": 1.0}


def test_differences_are_those_of_the_same_problems() -> None:
    assert "difference_to_first" not in ROWS[0]
    changes = [1.0 - 0.5, 0.5 - 0.0, 1.0 - 0.75]
    assert ROWS[1]["difference_to_first"]["mean"] == pytest.approx(sum(changes) / 3)


def test_results_are_json_and_a_table_of_all_models() -> None:
    json.dumps(ROWS)
    text = io.StringIO()
    Console(file=text, width=160).print(result_table(ROWS, width=160))
    for word in ("base", "run/step-000010", "avg@2", "pass@2", "difference", "failed", "0.417 ["):
        assert word in text.getvalue()


@pytest.mark.parametrize("width", [60, 160])
def test_with_many_columns_every_number_and_name_is_still_there(width: int) -> None:
    pass_at_k = {str(2**n): {"mean": n / 100} for n in range(7)}
    rows = [{**row, "samples_per_problem": 64, "pass_at_k": pass_at_k} for row in ROWS]
    text = io.StringIO()
    Console(file=text, width=width).print(result_table(rows, width=width))
    shown = text.getvalue()
    for word in ("base", "run/step-000010", "pass@64", "avg@64", "failed", "0.010", "0.060"):
        assert word in shown
    assert "+0.417" in shown
    assert "…" not in shown


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(tmp_path / "results.png", ROWS)
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_a_killed_evaluation_finds_its_finished_rollouts_again(tmp_path: Path) -> None:
    path = tmp_path / "model" / "rollouts.jsonl"
    (good, bad) = AFTER.groups[2].rollouts
    problem = AFTER.groups[2].problem
    bad = replace(bad, rollout_id="bad")
    for rollout in (good, bad):
        log = EvaluationLog(path, step=10)
        log.write(problem, rollout, version=0)
        log.close()
    with path.open("a") as file:
        file.write('{"torn')
    assert read_finished(path) == {good.rollout_id: good}
    log = EvaluationLog(path, step=10)
    log.write(problem, replace(bad, status=good.status, reward=0.25, cause=None), version=0)
    log.close()
    assert {name: one.reward for name, one in read_finished(path).items()} == {
        good.rollout_id: good.reward,
        "bad": 0.25,
    }
    whole = json.loads(path.read_text().splitlines()[-1])
    for damaged in (
        {"step": 1},
        whole | {"rollout_id": []},
        whole | {"reward": "x"},
        whole | {"reward": 10**400},
    ):
        path.write_text(json.dumps(damaged) + "\n")
        with pytest.raises(OutputError, match="line 1: not a rollout"):
            read_finished(path)
    path.write_text(200_000 * "[" + "\n")
    with pytest.raises(OutputError, match="line 1: not JSON"):
        read_finished(path)
