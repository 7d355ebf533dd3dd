"""Calls of actors and their deadlines; no process is started."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from torchtitan_rl.backends.monarch.runtime import call, first_line
from torchtitan_rl.errors import DeadlineError, ProcessLostError


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_a_call_whose_own_transport_times_out_is_a_deadline_error_with_or_without_a_deadline(
    timeout_s: float | None,
) -> None:
    async def gives_up() -> Any:
        raise TimeoutError

    with pytest.raises(DeadlineError, match="news of r timed out: TimeoutError"):
        asyncio.run(call(gives_up(), what="news of r", timeout_s=timeout_s))


def test_a_call_past_its_deadline_says_so() -> None:
    with pytest.raises(DeadlineError, match=r"news of r did not end within 0.01 s"):
        asyncio.run(call(asyncio.sleep(60), what="news of r", timeout_s=0.01))


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_an_actor_that_monarch_could_not_start_counts_as_lost(error: type[Exception]) -> None:
    async def fails() -> Any:
        raise error("error spawning actor mesh\n" + "statuses " * 100)

    with pytest.raises(ProcessLostError, match=r"start of r failed: error spawning actor mesh$"):
        asyncio.run(call(fails(), what="start of r"))


def test_an_error_without_words_has_a_first_line() -> None:
    assert first_line(TimeoutError()) == "TimeoutError"
    assert first_line(ValueError("a\nb")) == "a"
