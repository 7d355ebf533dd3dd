"""Kept responses: conversations are whole, bounded, and of one session."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.backends.vllm.openai_responses import ResponseStore
from torchtitan_rl.serving.errors import RefusedError


def response(name: str, size: int = 1) -> dict[str, Any]:
    return {"id": name, "output": [f"answer {name}" * size]}


def refusal(store: ResponseStore, owner: str | None, name: str) -> tuple[int, str]:
    with pytest.raises(RefusedError) as error:
        store.conversation(owner, name)
    return error.value.status, error.value.code


def test_a_conversation_has_all_inputs_and_outputs_in_order() -> None:
    store = ResponseStore()
    store.keep("s", response("a"), ["hi"], None)
    store.keep("s", response("b"), ["and", "then"], "a")
    store.keep("s", response("c"), ["or"], "a")
    assert store.conversation("s", "b") == ["hi", "answer a", "and", "then", "answer b"]
    assert store.conversation("s", "c") == ["hi", "answer a", "or", "answer c"]


def test_no_other_session_sees_a_response() -> None:
    store = ResponseStore()
    store.keep("s", response("a"), ["hi"], None)
    for owner in ("t", None):
        assert refusal(store, owner, "a") == (404, "response_not_found")
    store.delete("s", "a")
    assert refusal(store, "s", "a") == (404, "response_not_found")
    assert (len(store._stored), store.num_bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(1, 400), st.booleans()), max_size=30))
def test_the_bounds_hold_whatever_is_kept(turns: list[tuple[int, bool]]) -> None:
    store = ResponseStore(max_responses=5, max_bytes=12_000)
    previous = None
    for number, (size, continues) in enumerate(turns):
        name = str(number)
        store.keep(None, response(name, size), ["x" * size], previous if continues else None)
        previous = name
        assert len(store._stored) <= 5
        assert store.num_bytes <= 12_000
