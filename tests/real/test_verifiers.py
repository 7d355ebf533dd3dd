"""A short run on an environment of verifiers: its process, the endpoint, vLLM, torchtitan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real.runs import (
    ONE_REPLICA,
    ROOT,
    SMALL,
    Run,
    read_metrics,
    require_audit,
)
from tests.support.verifiers import needs_verifiers

NUM_STEPS = 1
NUM_ROLLOUTS = 16  # of a step

pytestmark = [needs_verifiers, pytest.mark.soak]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    arguments = [str(ROOT / "configs" / "verifiers_tiny.py"), *SMALL, *ONE_REPLICA]
    more = ("--output-dir", str(root), "--name", "sums", "--num-steps", str(NUM_STEPS))
    Run([*arguments, *more], log=root / "sums.log").require_success()
    return root / "sums"


@pytest.fixture(scope="module")
def rows(run_dir: Path) -> list[dict[str, Any]]:
    return read_metrics(run_dir)


def test_reward_and_metrics_of_a_rollout_are_those_of_its_trace(rows: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    for row in rows[1:]:
        assert row["train/rollouts"] == row["train/ended_completed"] == NUM_ROLLOUTS
        assert row["train/reward_mean"] == row["train/task/reward/right"]
        assert row["train/task/calls"] > 0  # of the environment's tool
        assert row["train/turns_max"] >= 2
    assert "evaluation/reward_mean" in rows[-1]


def test_the_tokens_that_are_trained_on_are_those_that_the_engine_sampled(
    rows: list[dict[str, Any]], run_dir: Path
) -> None:
    """The trainer finds the engine's logprobs on them; a conversation with calls is one episode."""
    for row in rows[1:]:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/discarded"]
        assert row["tokens/trained"] == row["trainer/trained_tokens"] > 0
        assert row["trainer/logprob_diff_max"] < 3e-5
        assert row["train/episodes_mean"] == 1
        assert row["train/task/agent/unseen_turns"] == 0
        assert row["train/task/agent/refused_requests"] == 0
    require_audit(run_dir)
