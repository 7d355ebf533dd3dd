import asyncio
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import turns
from torchtitan_rl.aio import background
from torchtitan_rl.observability import sinks
from torchtitan_rl.observability.engine import LoopLagSampler
from torchtitan_rl.observability.metrics import rollout_metrics, staleness_metrics
from torchtitan_rl.observability.sinks import Split, check_names, is_known, metric_names
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.types import (
    Completion,
    CompletionMetrics,
    FinishReason,
    Problem,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Turn,
    VersionRun,
)


def make_turn(
    prompt: tuple[int, ...],
    sampled: tuple[int, ...],
    *,
    versions: tuple[VersionRun, ...] = (VersionRun(0, 0),),
    cached_tokens: int = 0,
    in_flight: int = 1,
) -> Turn:
    return Turn(
        prompt_token_ids=prompt,
        completion=Completion(
            request_id="r",
            token_ids=sampled,
            logprobs=(-1.0,) * len(sampled),
            version_runs=versions,
            finish_reason=FinishReason.STOP,
            metrics=CompletionMetrics(
                queue_s=0.1 * in_flight,
                time_to_first_token_s=0.2,
                decode_s=0.3,
                inter_token_latency_s=0.01,
                cached_tokens=cached_tokens,
                requests_in_flight=in_flight,
            ),
        ),
    )


def make_rollout(
    reward: float | None,
    *turns: Turn,
    status: RolloutStatus = RolloutStatus.COMPLETED,
    metrics: dict[str, float] | None = None,
) -> Rollout:
    return Rollout(
        rollout_id="r",
        group_id="g",
        problem_id="p",
        turns=turns,
        status=status,
        reward=reward,
        metrics=metrics or {},
    )


def make_group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(group_id="g", problem=Problem(problem_id="p", data={}), rollouts=rollouts)


def test_rewards_are_described_over_rollouts_that_did_not_fail() -> None:
    failed = make_rollout(None, status=RolloutStatus.ENV_ERROR)
    groups = [
        make_group(make_rollout(0.0), make_rollout(1.0), failed),
        make_group(make_rollout(0.5), make_rollout(0.5)),
        make_group(make_rollout(0.5), failed),
    ]
    metrics = rollout_metrics(groups, Split.TRAIN)
    assert metrics["train/reward_mean"] == pytest.approx(0.5)
    assert metrics["train/reward_max"] == 1.0
    assert metrics["train/reward_min"] == 0.0
    assert metrics["train/reward_std"] == pytest.approx(math.sqrt(0.1))
    assert metrics["train/groups_without_variance_share"] == pytest.approx(2 / 3)
    assert metrics["train/rollouts"] == 7
    assert metrics["train/ended_env_error"] == 2
    assert metrics["train/ended_completed"] == 5
    assert metrics["train/ended_max_turns"] == 0


_TURNS = st.lists(
    st.builds(
        make_turn,
        st.lists(st.integers(0, 1), max_size=4).map(tuple),
        st.lists(st.integers(0, 1), max_size=2).map(tuple),
    ),
    max_size=4,
)


@given(_TURNS)
def test_episodes_are_counted_as_they_are_made(turns: list[Turn]) -> None:
    rollout = make_rollout(1.0, *turns)
    metrics = rollout_metrics([make_group(rollout)], Split.TRAIN)
    assert metrics["train/episodes_mean"] == len(rollout_to_episodes(rollout, 1.0))


def test_staleness_is_counted_per_token_not_per_turn() -> None:
    turn = make_turn((1,), (2, 3, 4), versions=(VersionRun(0, 5), VersionRun(2, 7)))
    metrics = staleness_metrics([make_group(make_rollout(1.0, turn))], trained_version=7)
    assert metrics["policy/staleness_mean"] == pytest.approx(4 / 3)
    assert metrics["policy/staleness_max"] == 2.0
    assert metrics["policy/age_share/2"] == pytest.approx(2 / 3)
    assert metrics["policy/age_share/0"] == pytest.approx(1 / 3)
    check_names(metrics)


@pytest.mark.parametrize("groups", [[], [make_group()], [make_group(make_rollout(None))]])
def test_every_name_is_in_the_table_and_nothing_fails_without_data(
    groups: list[RolloutGroup],
) -> None:
    check_names(rollout_metrics(groups, Split.TRAIN))
    check_names(rollout_metrics(groups, Split.EVALUATION))


def test_every_metric_of_a_full_rollout_is_in_the_table() -> None:
    rollout = make_rollout(1.0, make_turn((1,), (2,)), metrics={"exact": 1.0})
    phase_s = {"place": 1.0, "environment": 1.0, "generation": 2.0, "reward": 3.0, "teacher": 1.0}
    rollout = replace(rollout, phase_s=phase_s)
    metrics = rollout_metrics([make_group(rollout, rollout)], Split.TRAIN)
    check_names(metrics)
    of_rollouts = {name for name in metric_names() if name.startswith("train/")}
    assert {name for name in of_rollouts if not name.endswith("/*")} <= metrics.keys()


def test_each_name_has_one_row_and_each_row_of_the_page_is_a_name_with_three_columns() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    rows = [row for row in rows if not row.startswith(("| name |", "|---"))]
    assert [row for row in rows if not re.fullmatch(r"\| `\S+` (\| ([^|]|\\\|)+ ){3}\|", row)] == []
    names = [name for row in rows for name in sinks.expand_names(row.split("`")[1])]
    assert len(names) == len(metric_names())


def test_a_blocked_event_loop_shows_as_lag_once() -> None:
    async def block() -> tuple[float, float]:
        sampler = LoopLagSampler(interval_s=0.001)
        async with background(sampler.run()):
            await asyncio.sleep(0.005)
            sampler.take()
            time.sleep(0.05)
            await asyncio.sleep(0.002)
            return sampler.take()[1], sampler.take()[1]

    during, after = asyncio.run(block())
    assert during >= 45
    assert after == 0


def test_rewards_are_also_reported_for_each_part_of_a_mixture() -> None:
    sums = replace(turns.PROBLEM, task="sums")
    groups = [
        turns.group(turns.rollout(reward=1.0), turns.rollout(reward=0.0), problem=sums),
        turns.group(turns.rollout(reward=1.0), turns.rollout(reward=1.0), problem=sums),
        turns.group(turns.rollout(reward=0.25), problem=replace(turns.PROBLEM, task="gym/words")),
        turns.group(turns.rollout(reward=0.5)),
    ]
    metrics = rollout_metrics(groups, Split.TRAIN)
    of_task = {name: value for name, value in metrics.items() if "/of_task/" in name}
    assert of_task == {
        "train/of_task/sums/groups": 2.0,
        "train/of_task/sums/reward_mean": 0.75,
        "train/of_task/sums/groups_without_variance_share": 0.5,
        "train/of_task/sums/response_length_mean": 0.0,
        "train/of_task/gym/words/groups": 1.0,
        "train/of_task/gym/words/reward_mean": 0.25,
        "train/of_task/gym/words/response_length_mean": 0.0,
    }
    assert all(map(is_known, of_task))
