"""Token counts of sessions add up, whatever clients do."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.agents import TokenRouter, asked
from tests.support.async_tests import on_virtual_clock
from tests.support.served_sessions import make
from torchtitan_rl.errors import GenerationError
from torchtitan_rl.serving.recording import TOKEN_BYTES, TURN_TOKENS
from torchtitan_rl.serving.sessions import Sessions
from torchtitan_rl.token_sets import WHOLE_VOCABULARY
from torchtitan_rl.types import Grammar, TokenScores

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask_streamed", "cancel", "close", "reward", "wait", "fail"]),
        st.sampled_from("ab"),
        st.integers(1, 9),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
@on_virtual_clock
async def test_whatever_clients_do_every_sampled_token_is_accounted_for_once(steps):
    """Trap: conservation. The router's own count is the other side of the account."""
    router = TokenRouter()
    sessions = make(router, timeout_s=20.0)
    tasks: dict[str, list[asyncio.Task]] = {"a": [], "b": []}
    for action, name, number in steps:
        if action.startswith("ask"):
            told = (lambda _: None) if action == "ask_streamed" else None
            request = asked((1, 2, number), name, max_tokens=number)
            tasks[name].append(asyncio.create_task(sessions.complete(request, told)))
            await asyncio.sleep(0)
        elif action == "cancel" and tasks[name]:
            tasks[name][number % len(tasks[name])].cancel()
        elif action in ("close", "reward"):
            reward = 1.0 if action == "reward" else None
            closing = sessions.close(name, reward)
            await asyncio.gather(closing, return_exceptions=True)
        elif action == "fail":
            router.failure = GenerationError("lost")
            await asyncio.sleep(1)
            router.failure = None
        else:
            await asyncio.sleep(4 * number)
        _require_sums(sessions)
    await sessions.aclose()
    await asyncio.gather(*tasks["a"], *tasks["b"], return_exceptions=True)
    counts = _require_sums(sessions)
    assert counts["session_tokens_pending"] == 0
    assert counts["sessions_open"] == counts["session_tokens_held"] == 0
    assert counts["session_tokens_generated"] <= router.num_sampled
    if not any(action == "fail" for action, *_ in steps):
        assert counts["session_tokens_generated"] == router.num_sampled


@pytest.mark.parametrize("option", ["presence_penalty", "repetition_penalty", "logit_bias"])
@on_virtual_clock
async def test_trap_25_what_shifted_logits_gave_is_kept_and_not_trained(option):
    sessions = make()
    first = asked((1, 2), "s", max_tokens=3, temperature=0.5)
    history = (1, 2, *(await sessions.complete(first)).token_ids)
    text_only = {"engine_options": {"skip_special_tokens": False}, "stop": ("x",)}
    second = asked(history, "s", max_tokens=4, engine_options={option: 1.0})
    history += (await sessions.complete(second)).token_ids
    await sessions.complete(asked(history, "s", max_tokens=2, **text_only))
    report = await sessions.close("s", 1.0)
    (episode,) = report.episodes
    assert episode.loss_mask == (False,) * 2 + (True,) * 3 + (False,) * 4 + (True,) * 2
    assert episode.token_ids[: len(history)] == history
    assert report.tokens_masked == {"shifted_sampling": 4}
    assert (report.tokens_trained, report.tokens_pending) == (5, 0)
    assert report.temperatures == (0.5, 1.0)


@on_virtual_clock
async def test_cut_distributions_are_reported_with_their_tokens_and_trained_where_known():
    grammar = Grammar(data=b"rules", stop_token_ids=(0,))
    pair = b"\x03\0\0\0\x05\0\0\0"
    kept = (grammar, grammar, WHOLE_VOCABULARY, None, pair)
    sessions = make(TokenRouter(kept_tokens=kept))
    await sessions.complete(asked((1, 2), "s", max_tokens=5, top_p=0.9))
    held = sessions.counts()["session_tokens_held"]
    num_runs = 4
    assert held == TURN_TOKENS + 2 + 5 + (120 * num_runs + len(pair)) // TOKEN_BYTES
    report = await sessions.close("s", 1.0)
    assert report.tokens_masked == {"truncated_sampling": 1}
    assert report.tokens_trained == 4
    (episode,) = report.to_json()["episodes"]
    assert episode["loss_mask"] == [False, False, True, True, True, False, True]
    assert episode["kept_tokens"] == [None, None, "grammar", "grammar", None, None, [3, 5]]
    (span,) = episode["grammars"]
    assert (span["start"], span["end"], span["stop_token_ids"]) == (2, 4, [0])


@on_virtual_clock
async def test_a_session_does_not_hold_a_clients_schemas_and_counts_its_grammars():
    large = "x" * 100_000
    grammar = Grammar(data=large.encode(), stop_token_ids=(0,))
    sessions = make(TokenRouter(kept_tokens=(grammar, grammar)))
    options = {"structured_outputs": {"json": large}, "bad_words": [large]}
    await sessions.complete(asked((1, 2), "s", max_tokens=2, stop=(large,), engine_options=options))
    (turn,) = sessions._open["s"].recording.turns
    assert len(pickle.dumps(turn.request)) < 2_000
    held = sessions.counts()["session_tokens_held"]
    assert held == TURN_TOKENS + 2 + 2 + (120 + len(large)) // TOKEN_BYTES


class Scoring(TokenRouter):
    async def generate(self, request, on_progress=None):
        done = await super().generate(request, on_progress)
        return replace(done, prompt_scores=TokenScores(logprobs=(-1.0,) * 10_000))


@on_virtual_clock
async def test_a_session_keeps_no_scores_of_prompts_and_nothing_of_a_request_that_failed():
    router = Scoring()
    sessions = make(router)
    done = await sessions.complete(asked((1, 2), "s", max_tokens=2))
    assert done.prompt_scores is not None  # for the client
    asking = asyncio.create_task(sessions.complete(asked((3,), "s"), lambda _: None))
    await asyncio.sleep(5.5)
    router.failure = GenerationError("lost")
    with pytest.raises(GenerationError):
        await asking
    turns = sessions._open["s"].recording.turns
    assert len(pickle.dumps(turns)) < 2_000
    assert turns[1].partial == []
    counts = sessions.counts()
    assert counts["session_tokens_held"] == 2 * TURN_TOKENS + 2 + 2 + 1
    assert counts["session_tokens_generated"] == router.num_sampled == 7


def _held(session) -> int:
    """What its turns come to, or may still come to."""
    running = {id(turn) for turn, _ in session.recording.running.values()}
    return sum(
        TURN_TOKENS
        + len(turn.request.prompt_token_ids)
        # Of one that runs its last prompt token, as they are asked for above.
        + (turn.request.prompt_token_ids[-1] if id(turn) in running else turn.num_tokens)
        for turn in session.recording.turns
    )


def _require_sums(sessions: Sessions):
    counts = sessions.counts()
    parts = ("trained", "masked", "discarded", "pending")
    total = sum(counts[f"session_tokens_{part}"] for part in parts)
    assert total == counts["session_tokens_generated"]
    assert counts["session_tokens_pending"] >= 0
    assert counts["sessions_open"] == len(sessions._open)
    assert counts["session_tokens_held"] == sum(_held(s) for s in sessions._open.values())
    for session in sessions._open.values():
        assert sessions.read(session.session_id).tokens_trained == 0
    return counts
