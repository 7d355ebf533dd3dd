"""A mixture of a data file and reasoning-gym through vLLM, the checkers and the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real.runs import ONE_REPLICA, SMALL, Run, read_metrics, read_rollouts, require_audit
from torchtitan_rl.experiments.gsm8k.make_file import MakeFile, main

NUM_STEPS = 3
CONFIG = """
from dataclasses import replace

from torchtitan_rl import CurriculumConfig, MixtureTask
from torchtitan_rl.configs import reasoning_gym_tiny
from torchtitan_rl.experiments.gsm8k.task import Gsm8kTask

base = reasoning_gym_tiny.config
gym = replace(base.task, options={{}}, curriculum=CurriculumConfig(enabled=True, window=2))
words = Gsm8kTask(train=({file!r},), prompt="{{question}}", answer_pattern="", renderer="chatml")
config = replace(
    base,
    task=MixtureTask(
        tasks={{"gym": gym, "words": replace(words, validation=())}}, weights={{"gym": 3.0}}
    ),
    rollout=replace(base.rollout, max_total_tokens=256),
    generator=replace(base.generator, max_model_len=256),
    trainer=replace(base.trainer, row_len=256),
)
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("math_verify")
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
        assert row["train/ended_completed"] == row["train/rollouts"] == 16
        assert row["train/task/check_timeouts"] == 0
    require_audit(run_dir)


def test_parts_have_their_shares_and_their_own_rewards(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["train/of_task/words/groups"] == 1
        assert 0 <= row["train/of_task/words/reward_mean"] <= 1
        gym = [name for name in row if name.startswith("train/of_task/gym/")]
        assert sum(row[name] for name in gym if name.endswith("/groups")) == 3
    names = {name for row in rows for name in row if name.endswith("/groups")}
    assert "train/of_task/gym/chain_sum/level0/groups" in names
    assert "train/of_task/gym/spell_backward/level0/groups" in names


def test_what_is_trained_on_is_what_the_task_asked_and_scored(run_dir: Path) -> None:
    for rollout in read_rollouts(run_dir):
        question = rollout["messages"][-2]["content"]
        problem = rollout["problem"]
        assert question == problem.get("question") or problem["messages"][0]["content"]
        if rollout["messages"][-1]["content"] == problem["answer"]:
            assert rollout["reward"] == 1.0
