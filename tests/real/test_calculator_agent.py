"""A short run of the calculator agent: the `openai` client, the endpoint, vLLM, torchtitan. In each
test run, `test_verifiers` and `test_agent_libraries` show the same of other agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.real.runs import ONE_REPLICA, ROOT, SMALL, Run, read_metrics

pytestmark = pytest.mark.soak

CONFIG = ROOT / "configs" / "calculator_agent_tiny.py"
NUM_STEPS = 3
NUM_ROLLOUTS = 16  # of a step


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    arguments = [str(CONFIG), *SMALL, "--output-dir", str(root), "--name", "agent"]
    more = (*ONE_REPLICA, "--num-steps", str(NUM_STEPS), "--endpoint.start-timeout-s", "300")
    run = Run([*arguments, *more], log=root / "agent.log")
    run.require_success()
    return root / "agent"


@pytest.fixture(scope="module")
def rows(run_dir: Path) -> list[dict[str, Any]]:
    return read_metrics(run_dir)


def test_every_rollout_of_the_agent_is_completed_rewarded_and_accounted_for(
    rows: list[dict[str, Any]],
) -> None:
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    for row in rows[1:]:
        assert row["train/rollouts"] == row["train/ended_completed"] == NUM_ROLLOUTS
        assert 0 <= row["train/reward_mean"] <= 1
        assert row["train/task/right_answers"] <= row["train/reward_mean"] + 1e-9
        assert row["train/turns_max"] >= 2  # it called the calculator
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/discarded"]
        assert row["tokens/trained"] == row["trainer/trained_tokens"] > 0
    assert "evaluation/reward_mean" in rows[0]
    assert "evaluation/reward_mean" in rows[-1]


def test_the_tokens_that_the_client_was_sent_are_those_of_the_recorded_turns(
    rows: list[dict[str, Any]],
) -> None:
    for row in rows[1:]:
        assert row["train/task/agent/compared_turns"] == row["train/turns_mean"] > 1
        assert row["train/task/agent/token_mismatches"] == 0
        assert row["train/task/agent/unseen_turns"] == 0
        assert row["train/task/agent/refused_requests"] == 0


def test_the_trainer_finds_the_engines_logprobs_on_the_episodes_tokens(
    rows: list[dict[str, Any]],
) -> None:
    """Up to float32 rounding, so tokens and their contexts are those that the engine had."""
    assert all(row["trainer/logprob_diff_max"] < 3e-5 for row in rows[1:])


def test_trap_17_a_conversation_with_calls_stays_one_episode(rows: list[dict[str, Any]]) -> None:
    """Calls went through vLLM's hermes parser, the client and the template, and came back equal."""
    assert all(row["train/episodes_mean"] == 1 for row in rows[1:])
