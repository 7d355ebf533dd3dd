import asyncio
import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import turns
from torchtitan_rl.observability import sinks
from torchtitan_rl.observability.recorder import LoopLagSampler
from torchtitan_rl.observability.sinks import (
    MetricsLog,
    Split,
    check_names,
    is_known,
    metric_names,
)
from torchtitan_rl.observability.step_metrics import (
    rollout_metrics,
    staleness_metrics,
)
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


def test_groups_of_one_say_nothing_about_variance() -> None:
    metrics = rollout_metrics([make_group(make_rollout(1.0))], Split.EVALUATION)
    assert "evaluation/groups_without_variance_share" not in metrics
    assert metrics["evaluation/reward_mean"] == 1.0


def test_an_edited_history_is_one_more_episode() -> None:
    extended = make_rollout(1.0, make_turn((1,), (2, 3)), make_turn((1, 2, 3, 4), (5,)))
    edited = make_rollout(1.0, make_turn((1,), (2, 3)), make_turn((1, 2, 9), (5,)))
    shortened = make_rollout(1.0, make_turn((1,), (2, 3)), make_turn((1, 2), (5,)))
    groups = [make_group(r) for r in (extended, edited, shortened, make_rollout(None))]
    counts = [rollout_metrics([g], Split.TRAIN)["train/episodes_mean"] for g in groups]
    assert counts == [1, 2, 2, 0]


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


def test_lengths_and_generation_times_are_means_and_maxima() -> None:
    rollout = make_rollout(
        1.0,
        make_turn((1, 1), (2, 3), in_flight=1),
        make_turn((1, 1, 2, 3, 4, 4), (5,), cached_tokens=4, in_flight=3),
        metrics={"exact": 1.0},
    )
    other = make_rollout(0.0, make_turn((1, 1), (2,)), metrics={"exact": 0.0})
    metrics = rollout_metrics([make_group(rollout, other)], Split.TRAIN)
    assert metrics["train/turns_mean"] == 1.5
    assert metrics["train/response_length_mean"] == 2.0
    assert metrics["train/response_length_max"] == 3.0
    assert metrics["train/generation/queue_s_mean"] == pytest.approx(0.5 / 3)
    assert metrics["train/generation/queue_s_max"] == pytest.approx(0.3)
    assert metrics["train/generation/requests_in_flight_max"] == 3.0
    assert metrics["train/generation/cached_share"] == pytest.approx(0.4)
    assert metrics["train/generation/first_turn_cached_share"] == 0.0
    assert metrics["train/task/exact"] == 0.5


def test_staleness_is_counted_per_token_not_per_turn() -> None:
    turn = make_turn((1,), (2, 3, 4), versions=(VersionRun(0, 5), VersionRun(2, 7)))
    metrics = staleness_metrics([make_group(make_rollout(1.0, turn))], trained_version=7)
    assert metrics["policy/staleness_mean"] == pytest.approx(4 / 3)
    assert metrics["policy/staleness_max"] == 2.0
    assert metrics["policy/age_share/2"] == pytest.approx(2 / 3)
    assert metrics["policy/age_share/0"] == pytest.approx(1 / 3)
    check_names(metrics)


def test_failed_rollouts_are_not_trained_and_have_no_staleness() -> None:
    old = make_turn((1,), (2, 3), versions=(VersionRun(0, 0),))
    new = make_turn((1,), (2, 3), versions=(VersionRun(0, 7),))
    failed = make_rollout(None, old, status=RolloutStatus.ENV_ERROR)
    metrics = staleness_metrics([make_group(make_rollout(1.0, new), failed)], trained_version=7)
    assert metrics["policy/staleness_max"] == 0.0


def test_a_version_under_which_nothing_was_sampled_is_not_counted() -> None:
    turn = make_turn((1,), (2,), versions=(VersionRun(0, 3), VersionRun(1, 7)))
    empty = make_turn((1,), (), versions=())
    metrics = staleness_metrics([make_group(make_rollout(1.0, turn, empty))], trained_version=7)
    assert metrics["policy/staleness_mean"] == 4.0
    assert "policy/age_share/0" not in metrics


@pytest.mark.parametrize("groups", [[], [make_group()], [make_group(make_rollout(None))]])
def test_every_name_is_in_the_table_and_nothing_fails_without_data(
    groups: list[RolloutGroup],
) -> None:
    check_names(rollout_metrics(groups, Split.TRAIN))
    check_names(rollout_metrics(groups, Split.EVALUATION))


def test_every_metric_of_a_full_rollout_is_in_the_table() -> None:
    rollout = make_rollout(1.0, make_turn((1,), (2,)), metrics={"exact": 1.0})
    metrics = rollout_metrics([make_group(rollout, rollout)], Split.TRAIN)
    check_names(metrics)
    of_rollouts = {name for name in metric_names() if name.startswith("train/")}
    assert {name for name in of_rollouts if not name.endswith("/*")} <= metrics.keys()


def test_every_status_has_a_name_in_the_table() -> None:
    for status in RolloutStatus:
        assert is_known(f"train/ended_{status.value}")
        assert is_known(f"evaluation/ended_{status.value}")


def test_families_know_their_members_only() -> None:
    assert is_known("tokens/discarded/masked_nonfinite")
    assert not is_known("tokens/discarded/")
    assert not is_known("tokens/discarded/*")
    with pytest.raises(ValueError, match=r"unknown metrics \['train/rewrd'\]"):
        check_names(["train/rewrd", "train/reward_mean"])


def test_a_name_with_braces_stands_for_several() -> None:
    assert is_known("evaluation/generation/queue_s_max")
    assert is_known("trainer/age_3plus/kl_k3")
    assert not any("{" in name or "," in name for name in metric_names())


def test_each_name_has_one_row_and_each_row_of_the_page_is_a_name_with_three_columns() -> None:
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    rows = [row for row in rows if not row.startswith(("| name |", "|---"))]
    assert [row for row in rows if not re.fullmatch(r"\| `\S+` (\| ([^|]|\\\|)+ ){3}\|", row)] == []
    names = [name for row in rows for name in sinks._expand(row.split("`")[1])]
    assert len(names) == len(metric_names())


def read_rows(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def make_log(run_dir: Path, resume_step: int | None = None) -> MetricsLog:
    return MetricsLog(run_dir, tensorboard=False, resume_step=resume_step)


def test_training_and_evaluation_of_one_step_become_one_object(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.record(0, 0, {"evaluation/reward_mean": 0.1})
    log.record(1, 1, {"train/reward_mean": 0.2})
    log.record(1, 1, {"evaluation/reward_mean": 0.3})
    log.record(2, 2, {"train/reward_mean": 0.4})
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (rows[1]["train/reward_mean"], rows[1]["evaluation/reward_mean"]) == (0.2, 0.3)
    assert rows[1]["version"] == 1


def test_each_step_is_in_the_file_as_soon_as_it_is_recorded(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.record(1, 1, {"train/reward_mean": 0.2})
    assert len(read_rows(tmp_path)) == 1


def test_resuming_drops_later_steps_and_a_line_that_a_crash_cut_off(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    for step in range(1, 5):
        log.record(step, step, {"train/reward_mean": step})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step":5,"train/rew')
    resumed = make_log(tmp_path, resume_step=3)
    resumed.record(3, 3, {"evaluation/reward_mean": 1.0})
    resumed.record(4, 4, {"train/reward_mean": 40})
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert (rows[2]["train/reward_mean"], rows[2]["evaluation/reward_mean"]) == (3, 1.0)
    assert rows[3]["train/reward_mean"] == 40


def test_a_evaluation_that_ends_after_later_steps_keeps_its_step_and_survives_a_resume(
    tmp_path: Path,
) -> None:
    log = make_log(tmp_path)
    for step in (1, 2, 3):
        log.record(step, step, {"train/reward_mean": step})
    log.record(1, 1, {"evaluation/reward_mean": 0.5})
    log.record(4, 4, {"train/reward_mean": 4})
    log.close()
    make_log(tmp_path, resume_step=2).close()
    rows = read_rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 1]
    assert rows[2]["evaluation/reward_mean"] == 0.5


def test_a_cut_off_line_disappears_at_a_resume_from_the_newest_step(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.record(1, 1, {"train/reward_mean": 1})
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"st')
    make_log(tmp_path, resume_step=9).record(2, 2, {"train/reward_mean": 2})
    assert [row["step"] for row in read_rows(tmp_path)] == [1, 2]


def test_a_run_that_does_not_resume_starts_the_file_anew(tmp_path: Path) -> None:
    make_log(tmp_path).record(1, 1, {"train/reward_mean": 1})
    make_log(tmp_path).record(0, 0, {"evaluation/reward_mean": 1})
    assert [row["step"] for row in read_rows(tmp_path)] == [0]


def test_values_that_are_not_finite_are_null_not_invalid_json(tmp_path: Path) -> None:
    make_log(tmp_path).record(1, 1, {"trainer/entropy": math.nan, "trainer/loss": math.inf})
    row = read_rows(tmp_path)[0]
    assert (row["trainer/entropy"], row["trainer/loss"]) == (None, None)


def test_an_unknown_name_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown metrics"):
        make_log(tmp_path).record(1, 1, {"train/reward_mean": 1, "lag": 2})
    assert read_rows(tmp_path) == []


def test_a_blocked_event_loop_shows_as_lag_once() -> None:
    async def block() -> tuple[float, float]:
        async with LoopLagSampler(interval_s=0.001) as sampler:
            await asyncio.sleep(0.005)
            sampler.read()
            time.sleep(0.05)
            await asyncio.sleep(0.002)
            blocked = sampler.read()
            return blocked.max_ms, sampler.read().max_ms

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
