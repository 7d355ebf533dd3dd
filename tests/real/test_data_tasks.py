"""A mixture of a data file, reasoning-gym and search through vLLM, the checkers and the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real.runs import ONE_REPLICA, SMALL, Run, read_metrics, read_rollouts, require_audit
from torchtitan_rl.experiments.gsm8k.make_file import MakeFile, main
from torchtitan_rl.experiments.search.env import make_world

pytestmark = pytest.mark.soak

NUM_STEPS = 3
CONFIG = """
from dataclasses import replace

from torchtitan_rl import CurriculumConfig, MixtureTask
from torchtitan_rl.configs import search_tiny
from torchtitan_rl.experiments.gsm8k.task import Gsm8kTask
from torchtitan_rl.experiments.reasoning_gym.task import TASK

base = search_tiny.config
patient = {{"check_timeout_s": 50.0}}  # on a busy machine
curriculum = CurriculumConfig(enabled=True, window=2)
gym = replace(TASK, options={{}}, curriculum=curriculum, **patient)
words = Gsm8kTask(
    train=({file!r},), prompt="{{question}}", answer_pattern="", renderer="chatml", **patient
)
config = replace(
    base,
    task=MixtureTask(
        tasks={{"gym": gym, "words": replace(words, validation=()), "search": base.task}},
        weights={{"gym": 2.0}},
    ),
)
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("math_verify")
    pytest.importorskip("bm25s")
    root = tmp_path_factory.mktemp("runs")
    main(MakeFile(output=root / "words.jsonl"))
    config = root / "config.py"
    config.write_text(CONFIG.format(file=str(root / "words.jsonl")))
    arguments = [str(config), *SMALL, *ONE_REPLICA, "--num-steps", str(NUM_STEPS)]
    run = Run(
        [*arguments, "--output-dir", str(root), "--name", "mixture"], log=root / "mixture.log"
    )
    run.require_success()
    return root / "mixture"


@pytest.fixture(scope="module")
def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run_dir) if "train/rollouts" in row]


def test_every_rollout_is_completed_and_scored(rows: list[dict[str, Any]], run_dir: Path) -> None:
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        ends = ("completed", "max_turns", "max_tokens")  # the last two of searches without an end
        assert sum(row[f"train/ended_{end}"] for end in ends) == row["train/rollouts"] == 16
        assert row["train/task/check_timeouts"] == 0
    require_audit(run_dir)


def test_parts_have_their_shares_and_their_own_rewards(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["train/of_task/words/groups"] == 1
        assert 0 <= row["train/of_task/words/reward_mean"] <= 1
        gym = [name for name in row if name.startswith("train/of_task/gym/")]
        assert sum(row[name] for name in gym if name.endswith("/groups")) == 2
        assert row["train/of_task/search/groups"] == 1
        assert row["dataset/gym/chain_sum/level"] >= 0
    names = {name for row in rows for name in row if name.endswith("/groups")}
    assert "train/of_task/gym/chain_sum/level0/groups" in names
    assert "train/of_task/gym/spell_backward/level0/groups" in names


def test_what_is_trained_on_is_what_the_task_asked_and_scored(run_dir: Path) -> None:
    for rollout in read_rollouts(run_dir):
        if "world" in rollout["problem"]:
            continue
        question = rollout["messages"][-2]["content"]
        problem = rollout["problem"]
        assert question == problem.get("question") or problem["messages"][0]["content"]
        if rollout["messages"][-1]["content"] == problem["answer"]:
            assert rollout["reward"] == 1.0


def test_searches_are_answered_by_the_documents_and_the_conversation_is_one_episode(
    rows: list[dict[str, Any]], run_dir: Path
) -> None:
    found = set()
    for rollout in read_rollouts(run_dir):
        if world := rollout["problem"].get("world"):
            replies = [one["content"] for one in rollout["messages"] if one["role"] == "tool"]
            found.update(replies)
            known = {*make_world(world).documents, "nothing found"}
            assert [text for text in replies if text not in known and "error" not in text] == []
    assert len(found) > 5
    assert all(row["train/episodes_mean"] == 1 for row in rows)
    assert all(row["trainer/logprob_diff_max"] < 1e-4 for row in rows)
