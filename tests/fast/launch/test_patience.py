"""When a life of a worker is given up."""

from __future__ import annotations

from torchtitan_rl.launch.workers import Patience, unused_limit_s


def given_up(
    patience: Patience, *, beats: int = 0, contacted_s: float = 0.0, within_s: int = 2000
) -> tuple[int, str]:
    """After how many seconds, and why, with a beat in each of the first ones; one look a second."""
    for now_s in range(1, within_s):
        heard = str(min(now_s, beats)) if beats else ""
        if cause := patience.look(now_s, heard, lambda: now_s < contacted_s):  # noqa: B023
            return now_s, cause
    return 0, ""


def test_a_controller_that_was_heard_and_is_silent_for_forty_seconds_is_gone() -> None:
    for unused_s in (None, 60.0):
        at_s, cause = given_up(Patience(0.0, unused_s=unused_s), beats=100)
        assert at_s == 140
        assert cause == "nothing was heard from the controller for 40 s"


def test_where_no_run_was_lost_the_first_controller_is_waited_for() -> None:
    assert given_up(Patience(0.0, unused_s=None)) == (0, "")


def test_where_a_run_was_lost_it_is_not_waited_for_forever() -> None:
    at_s, cause = given_up(Patience(0.0, unused_s=60.0))
    assert at_s == 61  # the first look counts from 0
    assert cause == "the run that was lost did not come back for 60 s"


def test_who_is_attaching_gets_a_minute_more() -> None:
    assert given_up(Patience(0.0, unused_s=60.0), contacted_s=75.0)[0] == 75
    assert given_up(Patience(0.0, unused_s=60.0), contacted_s=1e6)[0] == 121


def test_lives_that_are_not_used_in_a_row_wait_longer_and_longer_within_a_limit() -> None:
    limits = [unused_limit_s(number) for number in range(100)]
    assert limits[:5] == [60.0, 120.0, 240.0, 300.0, 300.0]
    assert max(limits) == 300.0
