"""Agents of all libraries, as they come, against a real endpoint: their rollouts are trainable."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.real.runs import ROOT
from tests.support.documented_agents import documented_examples
from torchtitan_rl.experiments.agent_libraries.libraries import LIBRARIES

pytestmark = pytest.mark.soak

EXAMPLES = tuple(documented_examples())
ALL = (*LIBRARIES, *EXAMPLES)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    log = tmp_path_factory.mktemp("libraries") / "log"
    with log.open("w") as stderr:
        done = subprocess.run(
            [sys.executable, "-m", "tests.real.agent_libraries_scenario"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            timeout=1200,
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(params=ALL)
def rollouts(played: dict[str, Any], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = played["rollouts"][request.param]
    return found


def test_each_library_runs_unchanged_and_each_sampled_token_is_trained(
    rollouts: list[dict[str, Any]],
) -> None:
    for rollout in rollouts:
        assert rollout["status"] == "completed", rollout["cause"]
        assert rollout["num_trained"] == rollout["num_sampled"] > 0
        assert rollout["metrics"]["agent/refused_requests"] == 0
        assert rollout["metrics"]["agent/unseen_turns"] == 0


def test_the_trained_tokens_have_the_policys_logprobs_in_their_episodes(
    rollouts: list[dict[str, Any]],
) -> None:
    """Up to rounding, so tokens and their contexts are those that the engine had."""
    assert all(rollout["logprob_difference"] < 1e-4 for rollout in rollouts)


@pytest.mark.parametrize("library", [name for name in LIBRARIES if name != "smolagents"])
def test_a_conversation_whose_history_only_grows_is_one_episode(
    played: dict[str, Any], library: str
) -> None:
    rollouts = played["rollouts"][library]
    assert [rollout["num_episodes"] for rollout in rollouts] == [1] * len(rollouts)


def test_smolagents_rewrites_its_calls_as_text_which_begins_an_episode(
    played: dict[str, Any],
) -> None:
    for rollout in played["rollouts"]["smolagents"]:
        num_calls = rollout["metrics"]["calls"]
        assert num_calls < rollout["num_episodes"] <= len(rollout["texts"])


@pytest.mark.parametrize("library", [name for name in LIBRARIES if name != "smolagents"])
def test_agents_of_each_library_ask_the_user_and_call_the_tool(
    played: dict[str, Any], library: str
) -> None:
    rollouts = played["rollouts"][library]
    assert any(rollout["metrics"]["asked"] for rollout in rollouts)
    assert any(rollout["metrics"]["calls"] for rollout in rollouts)
    assert max(rollout["reward"] for rollout in rollouts) > 0.0


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_documented_agents_call_the_tool(played: dict[str, Any], example: str) -> None:
    assert any(len(rollout["texts"]) >= 2 for rollout in played["rollouts"][example])
