"""Where and when a lost host is attached again, with a worker that moves from port to port."""

from __future__ import annotations

from torchtitan_rl.launch.workers import NEXT_LIFE_S, Attempts, life_addresses

A, B, C = life_addresses("tcp://10.0.0.2:26600")[:3]


def test_an_address_that_was_not_used_is_tried_at_once() -> None:
    attempts = Attempts()
    attempts.note_loss(0.0, A)
    assert attempts.choose(0.0, [A]) is None
    assert attempts.choose(0.0, [A, B]) == B
    assert attempts.choose(0.0, []) is None


def test_where_it_was_lost_it_is_tried_again_once_its_worker_could_have_moved() -> None:
    attempts = Attempts()
    attempts.note_loss(100.0, A)
    assert attempts.choose(100.0 + NEXT_LIFE_S - 1, [A]) is None
    assert attempts.choose(100.0 + NEXT_LIFE_S, [A]) == A


def test_an_attempt_that_failed_is_repeated_with_growing_pauses() -> None:
    attempts, now_s, pauses = Attempts(), 0.0, []
    attempts.note_loss(now_s, A)
    for _ in range(7):
        assert attempts.choose(now_s, [B]) == B
        pauses.append(attempts.note_failure(now_s, B))
        assert attempts.choose(now_s + pauses[-1] - 1, [B]) is None
        now_s += pauses[-1]
    assert pauses == [30, 60, 120, 240, 480, 480, 480]


def test_after_a_failure_the_next_port_is_tried_first() -> None:
    attempts = Attempts()
    attempts.note_loss(0.0, A)
    attempts.note_failure(60.0, B)
    assert attempts.choose(1000.0, [A, B, C]) == C


def test_of_used_addresses_the_one_that_was_tried_last_is_the_last() -> None:
    attempts = Attempts()
    attempts.note_loss(0.0, A)
    attempts.note_failure(200.0, B)
    assert attempts.choose(1000.0, [B, A]) == A


def test_more_losses_than_a_worker_has_addresses_are_survived() -> None:
    attempts, now_s, addresses = Attempts(), 0.0, life_addresses(A)
    for number in range(50):
        attempts.note_loss(now_s, addresses[number % len(addresses)])
        now_s += NEXT_LIFE_S
        following = addresses[(number + 1) % len(addresses)]
        assert attempts.choose(now_s, [following]) == following
        now_s += 60.0


def test_an_address_that_was_attached_after_failures_begins_anew() -> None:
    attempts = Attempts()
    for _ in range(5):
        attempts.note_failure(0.0, A)
    attempts.note_loss(1000.0, A)
    assert attempts.note_failure(2000.0, A) == 30.0
