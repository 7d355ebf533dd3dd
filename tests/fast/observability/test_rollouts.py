import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from tests.fast.observability.test_metrics import make_group, make_rollout, make_turn
from tests.support.turns import group, rollout, turn, with_experts, with_kept
from torchtitan_rl.observability.rollouts import RolloutLog, choose_rollouts, groups_from_rows
from torchtitan_rl.observability.sinks import Row, Split, read_rows
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.token_sets import pack_kept
from torchtitan_rl.types import Grammar, RolloutStatus

FAILED = make_rollout(None, status=RolloutStatus.ENV_ERROR)


def chosen(*rewards: float | None, count: int = 3) -> list[tuple[str, float | None]]:
    group = make_group(*(FAILED if reward is None else make_rollout(reward) for reward in rewards))
    picks = choose_rollouts([group], count, random.Random(0))
    return [(why, rollout.reward) for why, _, rollout in picks]


def test_the_best_the_worst_and_random_others_are_chosen() -> None:
    picks = chosen(0.2, 0.9, 0.5, 0.1, 0.5, count=4)
    assert picks == [("best", 0.9), ("worst", 0.1), *picks[2:]]
    assert [why for why, _ in picks[2:]] == ["random", "random"]


def test_a_trained_turn_has_its_advantage_and_its_mask_and_any_turn_how_it_was_sampled(
    tmp_path: Path,
) -> None:
    first = turn([1, 2], [3, 4])
    timings = make_turn((1, 2), (3, 4)).completion.metrics
    assert timings is not None
    unseen = replace(turn([7], [8]), is_seen=False)
    own = replace(first.completion, stop_reason="</s>", logprobs=(-0.5, math.nan), metrics=timings)
    good = rollout(replace(first, completion=own), turn([1, 2, 3, 4, 5], [6]), unseen, reward=1.0)
    long = rollout(turn(range(40), [9]), rollout_id="g/r1", reward=0.0)
    failed = rollout(turn([1], [2]), rollout_id="g/r2", reward=None, status=RolloutStatus.ENV_ERROR)
    groups = [group(good, long, failed)]
    episodes = EpisodeBatcher(config=RolloutConfig(advantage="mean"), row_len=32)(groups).episodes
    log = RolloutLog(tmp_path / "rollouts.jsonl", per_step=3, seed=0)
    log.decode = lambda token_ids: "-".join(map(str, token_ids))
    log.record(1, 1, groups, Split.TRAIN, episodes)
    rows = map(json.loads, (tmp_path / "rollouts.jsonl").read_text().splitlines())
    found = {row["rollout_id"]: row["turns"] for row in rows}
    trained = {
        name: [(one["advantage"], one["loss_mask"]) for one in turns]
        for name, turns in found.items()
    }
    assert trained == {
        "g/r0": [(0.5, [1, 0]), (0.5, [1]), (None, [0])],
        "g/r1": [(None, [0])],  # it does not fit a row
        "g/r2": [(None, [0])],
    }
    written = found["g/r0"][0]
    assert (written["stop_reason"], written["text"]) == ("</s>", "3-4")
    assert written["metrics"] == asdict(timings)


def test_rollouts_are_written_once_though_the_row_of_their_step_is_tried_again(
    tmp_path: Path,
) -> None:
    groups = [make_group(make_rollout(0.5, make_turn((1,), (2, 3))), make_rollout(0.25))]
    path = tmp_path / "rollouts.jsonl"
    log = RolloutLog(path, per_step=2, seed=0)
    for split in (Split.TRAIN, Split.EVALUATION):
        said = log.record(1, 1, groups, split)
        assert said[f"logged/{split}/rollouts"] == 2.0
        assert said[f"logged/{split}/tokens"] == 2.0
        assert said[f"logged/{split}/reward_sum"] == 0.75
        content = path.read_text()
        assert log.record(1, 1, groups, split) == said
        assert path.read_text() == content


def test_a_resumed_run_chooses_the_rollouts_that_one_without_an_interruption_chooses(
    tmp_path: Path,
) -> None:
    groups = [make_group(*(make_rollout(reward / 10) for reward in range(10)))]
    path = tmp_path / "rollouts.jsonl"

    def record(steps: range, resume_step: int | None) -> list[Row]:
        log = RolloutLog(path, per_step=5, seed=1, resume_step=resume_step)
        for step in steps:
            log.record(step, step, groups, Split.TRAIN)
        log.close()
        return [line.row for line in read_rows(path)]

    whole = record(range(1, 6), None)
    assert record(range(4, 6), 3) == whole


def test_groups_that_are_recorded_whole_make_the_same_batch_again(tmp_path: Path) -> None:
    """Also kept tokens, experts, logprobs that are not finite, unseen turns and branch rewards."""
    kept = (pack_kept(np.arange(9) < 3), Grammar(data=b"\0g", stop_token_ids=(2,)), None)
    cut = with_kept(turn([1, 2], [3, 4, 5], logprobs=[-0.1, math.nan, -1 / 3]), kept)
    cut = with_experts(cut, 0, 200, 254, 255)
    agent = replace(turn([8], [7, 7], versions=[0, 1]), branch_reward=0.25, request_key="a")
    unseen = replace(turn([7], [8]), is_seen=False)
    groups = [
        group(rollout(cut, unseen, reward=1 / 7), rollout(agent, rollout_id="g/r1", reward=0.0)),
        group(rollout(turn([1], [2]), rollout_id="h/r0"), group_id="h"),
    ]
    batcher = EpisodeBatcher(config=RolloutConfig(advantage="std"), row_len=32)
    batched = batcher(groups)
    log = RolloutLog(tmp_path / "rollouts.jsonl", per_step="all", seed=0)
    log.vocab_size = 9
    assert batched.batch is not None
    logprobs = batched.by_episode(np.arange(batched.batch.num_tokens, dtype=np.float32))
    for step in (1, 2):
        log.record(step, step, groups, Split.TRAIN, batched.episodes, logprobs)
        log.record(step, step, groups[:1], Split.EVALUATION)
    log.close()
    rows = [line.row for line in read_rows(tmp_path / "rollouts.jsonl")]
    for step in (1, 2):
        own = [row for row in rows if row["step"] == step and row["split"] == Split.TRAIN]
        again = groups_from_rows(own)
        assert repr(batcher(again)) == repr(batched)
        assert [one.problem for one in again] == [one.problem for one in groups]
    assert rows[0]["turns"][0]["num_kept"] == [3, None, None]
    assert rows[0]["turns"][0]["trainer_logprobs"] == [2.0, 3.0, 4.0]
    assert rows[1]["turns"][0]["num_kept"] is None
    assert len(log.last_rows[Split.TRAIN]) == 3
