import json
import random
from pathlib import Path

from tests.fast.observability.test_metrics import make_group, make_rollout, make_turn
from torchtitan_rl.observability.metric_table import Split
from torchtitan_rl.observability.rollout_log import RolloutLog, choose_rollouts
from torchtitan_rl.types import RolloutStatus, VersionRun

FAILED = make_rollout(None, status=RolloutStatus.ENV_ERROR)


def chosen(*rewards: float | None, count: int = 3) -> list[tuple[str, float | None]]:
    group = make_group(*(FAILED if reward is None else make_rollout(reward) for reward in rewards))
    picks = choose_rollouts([group], count, random.Random(0))
    return [(why, rollout.reward) for why, _, rollout in picks]


def test_the_best_the_worst_and_random_others_are_chosen() -> None:
    picks = chosen(0.2, 0.9, 0.5, 0.1, 0.5, count=4)
    assert picks == [("best", 0.9), ("worst", 0.1), *picks[2:]]
    assert [why for why, _ in picks[2:]] == ["random", "random"]


def test_no_rollout_is_chosen_twice_and_few_are_enough() -> None:
    assert chosen(0.5) == [("best", 0.5)]
    assert chosen(0.5, 0.7) == [("best", 0.7), ("worst", 0.5)]
    assert chosen(0.5, 0.7, count=1) == [("best", 0.7)]
    assert chosen(0.5, count=0) == []
    assert chosen() == []


def test_failed_rollouts_are_only_chosen_at_random() -> None:
    assert chosen(None, None, count=2) == [("random", None), ("random", None)]
    assert chosen(0.5, None) == [("best", 0.5), ("random", None)]


def test_a_line_holds_text_tokens_logprobs_versions_rewards_and_status(tmp_path: Path) -> None:
    turn = make_turn((1, 2), (3, 4, 5), versions=(VersionRun(0, 6), VersionRun(2, 7)))
    log = RolloutLog(tmp_path / "rollouts.jsonl", per_step=1, seed=0)
    log.record(4, 7, [make_group(make_rollout(0.5, turn))], Split.TRAIN)
    row = json.loads((tmp_path / "rollouts.jsonl").read_text())
    assert (row["step"], row["version"], row["split"], row["chosen"]) == (4, 7, "train", "best")
    assert (row["reward"], row["status"]) == (0.5, "completed")
    written = row["turns"][0]
    assert written["prompt_token_ids"] == [1, 2]
    assert written["token_ids"] == [3, 4, 5]
    assert written["logprobs"] == [-1.0, -1.0, -1.0]
    assert written["versions"] == [6, 6, 7]


def test_a_resumed_run_writes_the_same_lines_as_one_that_was_not_interrupted(
    tmp_path: Path,
) -> None:
    groups = [make_group(*(make_rollout(reward / 10) for reward in range(10)))]

    def record(steps: range, resume_step: int | None) -> str:
        path = tmp_path / "rollouts.jsonl"
        log = RolloutLog(path, per_step=5, seed=1, resume_step=resume_step)
        for step in steps:
            log.record(step, step, groups, Split.TRAIN)
        log.close()
        return path.read_text()

    whole = record(range(1, 6), None)
    assert record(range(4, 6), 3) == whole
