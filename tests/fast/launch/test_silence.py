from __future__ import annotations

from torchtitan_rl.launch.workers import BEAT_S, CONTROLLER_LOST_S, HOST_LOST_S, Heartbeat


def listen(silence: Heartbeat, start_s: float, signs: list[object]) -> list[float]:
    """One look a second."""
    return [silence.look(start_s + second, sign) for second, sign in enumerate(signs, start=1)]


def test_silence_is_the_time_since_the_sign_changed():
    assert listen(Heartbeat(0.0), 0.0, [1, 1, 1, 2, 2]) == [0, 1, 2, 0, 1]


def test_a_beat_that_never_comes_is_silence_from_the_first_look_on():
    silence = Heartbeat(100.0)
    assert listen(silence, 100.0, [None] * 3) == [1, 2, 3]


def test_a_listener_that_was_stopped_does_not_count_its_own_stop():
    silence = Heartbeat(0.0)
    silence.look(1.0, "beat")
    assert silence.look(3601.0, "beat") <= 2 * BEAT_S
    assert silence.look(3602.0, "next beat") == 0


def test_a_controller_may_stand_still_for_twenty_seconds_and_is_gone_within_a_minute():
    assert 20 + 2 * BEAT_S < CONTROLLER_LOST_S < 55


def test_a_lost_host_is_noticed_within_fifteen_seconds_and_no_sooner_than_several_beats():
    assert 3 * BEAT_S < HOST_LOST_S <= 15 - BEAT_S
