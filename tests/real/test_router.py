"""Router and endpoint over replicas in processes of their own: what callers and clients notice of
pulls, pauses and a killed replica."""

from __future__ import annotations

from typing import Any

import pytest

from tests.real.runs import play


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = play("replicas_scenario", tmp_path_factory.mktemp("replicas"))
    return found


def test_no_pull_and_no_pause_changes_loses_or_repeats_a_streamed_greedy_request(
    seen: dict[str, Any],
) -> None:
    found = seen["disturbed"]
    assert (found["num_done"], found["num_equal"]) == (16, 16)
    assert found["partials_fit"]
    assert found["partial_tokens"] > 16
    assert found["heard_fits"]  # what was streamed is the beginning of each completion
    assert found["gaps"] == 0
    assert found["messages"] > 5 * 16
    assert found["unheard"] < 16 * 50  # the last of them come with the completions
    assert found["num_boundaries"] > 16
    assert found["replicas"] == ["replica0", "replica1"]
    assert found["states"] == ["serving", "serving"]
    assert (found["outstanding"], found["lagging"]) == (0, 0)
    assert set(found["unaccounted"]) == {0}  # aborts, cancels and pulls lose no sampled token
    assert found["known"] == found["sampled"] > 16 * 100
    assert found["not_returned"] == 6


def test_a_pinned_replica_keeps_its_version_until_it_is_released(seen: dict[str, Any]) -> None:
    pin = seen["pin"]
    assert pin["sampled_under"] == [pin["version"]]
    assert pin["is_held"]
    assert pin["others"] == [pin["version"], pin["version"] + 1]
    assert pin["after"] == [pin["version"] + 1] * 2


def test_no_pull_and_no_pause_changes_loses_or_repeats_a_chat_of_the_official_client(
    seen: dict[str, Any],
) -> None:
    found = seen["endpoint"]
    assert (found["pauses"], found["statuses"]) == (3, [200])
    assert found["pulled"] == [6, 6]
    assert not found["was_over"]  # the chats outlasted the last pull
    assert found["cuts_heard"] > 12  # versions changed within answers
    # 12 chats twice, of two turns each.
    assert found["complete"] == 24
    assert found["equal"] == 12
    assert found["recorded"] == 24
    assert (found["polled"], found["completed"]) == (48, 48)
    assert (found["refused"], found["aborted"], found["outstanding"]) == ({}, 0, 0)
    # Each token was sampled once, and each that was sampled was answered.
    assert found["sampled"] == found["answered"]
    assert found["states"] == ["serving", "serving"]


def test_streams_go_on_where_their_replica_is_killed(seen: dict[str, Any]) -> None:
    found = seen["killed"]
    assert found["num_equal"] == 16
    assert found["heard_fits"]
    assert found["gaps"] == 0
    assert found["states"] == {"replica0": "dead", "replica1": "serving"}
