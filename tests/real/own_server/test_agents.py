"""Agents that use the official client, through HTTP and vLLM: their rollouts have its tokens."""

from __future__ import annotations

import re
from typing import Any

import pytest

STOP = ("e", "t", "7", "q")


@pytest.fixture(scope="module")
def results(openai_scenario: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = openai_scenario["agents"]
    return found


def completed(results: dict[str, Any], name: str, reward: float = 1.0) -> dict[str, Any]:
    rollout: dict[str, Any] = results[name]
    assert (rollout["status"], rollout["reward"]) == ("completed", reward), rollout["cause"]
    return rollout


def test_a_conversations_tokens_and_logprobs_are_those_that_the_client_was_sent(
    results: dict[str, Any],
) -> None:
    rollout = completed(results, "conversation")
    assert [turn[:2] for turn in rollout["turns"]] == [said[:2] for said in rollout["said"]]
    for (*_, logprobs, _), (*_, told) in zip(rollout["turns"], rollout["said"], strict=True):
        assert told == pytest.approx(logprobs, abs=1e-6)
    (episode,) = rollout["episodes"]
    assert sum(episode[1]) == sum(len(turn[1]) for turn in rollout["turns"])
    assert rollout["metrics"]["agent/ignored_options"] == 3  # top_p of three requests


def test_a_streamed_chat_ends_at_its_stop_string_with_the_engines_tokens(
    results: dict[str, Any],
) -> None:
    rollout = completed(results, "streamed_chat")
    ((prompt, token_ids, finish_reason),) = rollout["said"]
    ((*_, finished),) = rollout["turns"]
    assert [[prompt, token_ids]] == [turn[:2] for turn in rollout["turns"]]
    assert finish_reason == finished == "stop"
    text = re.sub(r"<[^<>]*>", "", rollout["texts"][0])  # special tokens are no text
    assert text[-1] in STOP
    assert not any(character in text[:-1] for character in STOP)


def test_a_stream_arrives_in_pieces_while_it_is_sampled(results: dict[str, Any]) -> None:
    rollout = completed(results, "streamed_pieces")
    pieces = rollout["said"]
    assert len(pieces) > 2
    ((_, token_ids, *_),) = rollout["turns"]
    assert [token for piece in pieces for token in piece] == list(token_ids)


def test_two_choices_of_one_request_are_two_turns_and_two_episodes(
    results: dict[str, Any],
) -> None:
    rollout = completed(results, "two_choices")
    assert sorted(turn[:2] for turn in rollout["turns"]) == sorted(rollout["said"])
    assert rollout["turns"][0][1] != rollout["turns"][1][1]
    assert len(rollout["episodes"]) == 2


def test_after_the_last_turn_the_client_is_told_that_its_session_is_closed(
    results: dict[str, Any],
) -> None:
    rollout = results["over_the_limit"]
    assert (rollout["status"], rollout["reward"]) == ("max_turns", 0.25)
    assert rollout["said"] == [[4, "session_closed"]]


def test_a_turn_whose_client_hung_up_is_recorded_and_not_trained(results: dict[str, Any]) -> None:
    rollout = completed(results, "impatient")
    assert rollout["said"] == ["gone"]
    # The abandoned turn is sampled to its end, whenever that is.
    turns = sorted(zip(rollout["turns"], rollout["seen"], strict=True))
    (abandoned, was_seen), (answered, is_seen) = turns
    assert (abandoned[0], was_seen, is_seen) == ([5, 6], False, True)
    assert abandoned[3] in ("length", "stop")
    ((token_ids, loss_mask),) = rollout["episodes"]
    assert token_ids == answered[0] + answered[1]
    assert sum(loss_mask) == len(answered[1])


def test_a_reward_posted_by_http_ends_the_rollout(results: dict[str, Any]) -> None:
    rollout = completed(results, "posts_its_reward", reward=0.75)
    answer, refused = rollout["said"]
    assert (answer["reward"], answer["turns"]) == (0.75, 1)
    assert refused == "session_closed"


def test_a_constraint_is_not_applied_so_that_its_tokens_are_trained(
    results: dict[str, Any],
) -> None:
    ((_, token_ids, *_),) = completed(results, "biased")["turns"]
    assert set(token_ids) != {7}
    ((_, loss_mask),) = results["biased"]["episodes"]
    assert sum(loss_mask) == len(token_ids)


def test_the_synchronous_client_in_an_async_agent_does_not_stop_the_run(
    results: dict[str, Any],
) -> None:
    assert completed(results, "blocking")["said"] == ["length"]


def test_a_program_with_the_official_client_is_an_agent(results: dict[str, Any]) -> None:
    assert len(completed(results, "command", reward=5.0)["turns"]) == 1


def test_every_session_ended_in_a_named_way(results: dict[str, Any]) -> None:
    counts = results["counts"]
    assert counts["sessions_open"] == 0
    assert (counts["sessions_rewarded"], counts["sessions_limit"]) == (9, 1)
