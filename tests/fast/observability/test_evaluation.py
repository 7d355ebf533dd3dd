import itertools
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fast.observability.test_metrics import make_group, make_rollout
from torchtitan_rl.observability.evaluation import (
    evaluation_statistics,
    mean_interval,
    pass_at_k,
    t_quantile,
)
from torchtitan_rl.observability.sinks import check_names
from torchtitan_rl.types import RolloutGroup, RolloutStatus

SOLVED = 1.0 - 1e-9


def group(*rewards: float | None) -> RolloutGroup:
    return make_group(
        *(
            make_rollout(
                r, status=RolloutStatus.ENV_ERROR if r is None else RolloutStatus.COMPLETED
            )
            for r in rewards
        )
    )


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    # From a printed table of Student's t, 0.975.
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (29, 2.045), (120, 1.980)],
)
def test_quantiles_of_students_t_are_those_of_the_table(degrees: int, quantile: float) -> None:
    assert t_quantile(0.975, degrees=degrees) == pytest.approx(quantile, rel=2e-3)


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_k_subsets_with_a_solution(n: int, data: st.DataObject) -> None:
    solved = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    samples = [i < solved for i in range(n)]
    by_hand = fmean(any(subset) for subset in itertools.combinations(samples, k))
    assert pass_at_k(n, solved, k) == pytest.approx(by_hand)


def test_problems_are_the_unit_of_the_interval() -> None:
    metrics = evaluation_statistics([group(0, 1), group(1, 1), group(0, 0)], success_reward=SOLVED)
    interval = mean_interval([0.5, 1.0, 0.0])
    assert interval is not None
    assert metrics["reward_ci95_low"] == interval.low
    assert metrics["reward_ci95_high"] == interval.high


def test_pass_at_k_is_given_up_to_the_number_of_samples() -> None:
    groups = [group(0, 1, 0, 0, 0), group(1, 1, 0.5, 1, 1)]
    metrics = evaluation_statistics(groups, success_reward=SOLVED)
    shares = {name: value for name, value in metrics.items() if name.startswith("pass_at_k/")}
    assert shares == pytest.approx(
        {
            "pass_at_k/1": (1 / 5 + 4 / 5) / 2,
            "pass_at_k/2": (2 / 5 + 1) / 2,
            "pass_at_k/4": (4 / 5 + 1) / 2,
            "pass_at_k/5": 1.0,
        }
    )


def test_a_failed_rollout_has_no_reward_and_has_not_solved_its_problem() -> None:
    metrics = evaluation_statistics([group(1, None), group(None, None)], success_reward=SOLVED)
    assert metrics["pass_at_k/1"] == 0.25
    assert "reward_ci95_low" not in metrics  # one problem with a reward has no spread


@pytest.mark.parametrize("groups", [[], [group()], [group(None)], [group(0, 1), group(1)]])
def test_every_name_is_in_the_table_and_nothing_fails_without_data(
    groups: list[RolloutGroup],
) -> None:
    metrics = evaluation_statistics(groups, success_reward=SOLVED)
    check_names(f"evaluation/{name}" for name in metrics)
