"""Two configurations of real tasks at toy size, through vLLM and the trainer: one with a retriever
and asynchronous, one colocated with what DAPO has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real.runs import Run, read_metrics, read_rollouts, require_audit
from tests.support.ready_configs import PEOPLE, toy

pytestmark = pytest.mark.soak

pytest.importorskip("bm25s")
pytest.importorskip("math_verify")


def train(name: str, root: Path) -> tuple[Path, list[dict[str, Any]]]:
    """The directory of a run of two steps, and the rows of the steps."""
    words = [*toy(name, root), "--task.sandbox.isolation", "limits", "--num-steps", "2"]
    words += ["--metrics.progress", "plain", "--output-dir", str(root)]
    Run(words, log=root / "log").require_success()
    require_audit(root / name)
    rows = [row for row in read_metrics(root / name) if "train/rollouts" in row]
    assert [row["train/rollouts"] for row in rows] == [16, 16]
    assert all(row["trainer/logprob_diff_max"] < 1e-4 for row in rows)
    return root / name, rows


def test_search_r1_trains_on_searches_that_the_retriever_answers(tmp_path: Path) -> None:
    run_dir, rows = train("search_r1_qwen3_4b", tmp_path)
    assert all(row["train/task/tool_calls"] > 0 for row in rows)
    replies = [
        message["content"]
        for rollout in read_rollouts(run_dir)
        for message in rollout["messages"]
        if message["role"] == "tool"
    ]
    known = {f"Doc 1: {person} lives in {town}." for person, town in PEOPLE}
    assert {reply.split("\n")[0] for reply in replies} & known


def test_dapo_trains_on_groups_with_different_rewards_only(tmp_path: Path) -> None:
    _, rows = train("dapo_math_qwen3_8b", tmp_path)
    assert all(0 < row["train/reward_mean"] < 1 for row in rows)
    assert rows[-1]["total/groups_discarded/zero_variance"] > 0
    assert all(row["trainer/updates"] == 4 for row in rows)
