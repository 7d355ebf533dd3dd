"""Sessions: exact turns, endings, refusals, and token counts that add up."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace

import pytest

from tests.support.agents import TokenRouter, asked
from tests.support.async_tests import on_virtual_clock
from tests.support.served_sessions import CLOSED, TIMEOUT_S, make, refused
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.errors import GenerationError
from torchtitan_rl.serving import sessions as sessions_module
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.sessions import TURN_TOKENS, Sessions
from torchtitan_rl.types import Completion, FinishReason, VersionRun


@on_virtual_clock
async def test_a_conversation_becomes_one_episode_with_user_and_tool_tokens_masked():
    sessions = make()
    first = await sessions.complete(asked((1, 2), "s", max_tokens=2))
    prompt = (1, 2, *first.token_ids, 0, 7)
    second = await sessions.complete(asked(prompt, "s", max_tokens=3))
    report = await sessions.close("s", 0.5)
    (episode,) = report.episodes
    assert episode.token_ids == prompt + second.token_ids
    mask = (False, False, True, True, False, False, True, True, True)
    assert episode.loss_mask == mask
    sampled = first.logprobs + second.logprobs
    assert tuple(v for v, m in zip(episode.logprobs, mask, strict=True) if m) == sampled
    assert set(episode.advantages) == {0.0, 0.5}
    assert report.tokens_trained == report.tokens_generated == 5


@on_virtual_clock
async def test_concurrent_requests_of_a_session_are_turns_in_the_order_in_which_they_began():
    sessions = make()
    async with asyncio.TaskGroup() as group:
        long = group.create_task(sessions.complete(asked((1,), "s", max_tokens=5)))
        short = group.create_task(sessions.complete(asked((2,), "s", max_tokens=2)))
    report = await sessions.close("s", 1.0)
    first, second = report.episodes
    assert first.token_ids == (1, *long.result().token_ids)
    assert second.token_ids == (2, *short.result().token_ids)


@on_virtual_clock
async def test_an_idle_session_is_abandoned_and_its_turns_are_freed():
    sessions = make()
    await sessions.complete(asked((1,), "s", max_tokens=3))
    await asyncio.sleep(TIMEOUT_S - 1)
    assert sessions.read("s").ending is None
    await sessions.complete(asked((1,), "s", max_tokens=3))  # used again: time starts anew
    await asyncio.sleep(TIMEOUT_S - 1)
    assert sessions.read("s").ending is None
    await asyncio.sleep(2)
    assert sessions.read("s").ending == "abandoned"
    assert sessions.read("s").tokens_discarded == {"abandoned": 6}
    assert sessions.counts()["sessions_abandoned"] == 1
    assert not sessions._open
    assert await refused(sessions.complete(asked((1,), "s"))) == CLOSED
    assert await refused(sessions.close("s", 1.0)) == CLOSED  # the reward comes too late


@on_virtual_clock
async def test_a_session_whose_request_runs_longer_than_the_timeout_is_not_abandoned():
    sessions = make()
    await sessions.complete(asked((1,), "s", max_tokens=int(3 * TIMEOUT_S)))
    assert (await sessions.close("s", 1.0)).tokens_trained == 3 * TIMEOUT_S


@on_virtual_clock
async def test_two_closes_at_once_end_a_session_once():
    sessions = make()
    running = asyncio.ensure_future(sessions.complete(asked((1,), "s", max_tokens=50)))
    await asyncio.sleep(3.5)
    answers = await asyncio.gather(
        sessions.close("s", 1.0), sessions.close("s", 2.0), return_exceptions=True
    )
    assert [isinstance(answer, RefusedError) for answer in answers] == [False, True]
    assert await refused(running) == CLOSED


@on_virtual_clock
async def test_requests_that_run_when_their_session_closes_are_aborted_and_masked():
    router = TokenRouter()
    sessions = make(router)
    await sessions.complete(asked((1,), "s", max_tokens=2))
    running = asyncio.ensure_future(sessions.complete(asked((3,), "s", max_tokens=50)))
    await asyncio.sleep(4.5)
    report = await sessions.close("s", 1.0)
    assert await refused(running) == CLOSED
    assert report.tokens_generated == router.num_sampled == 6
    assert report.tokens_masked == {"unseen_turn": 4}
    assert report.unseen_turns == 1
    assert report.tokens_trained == 2
    assert all(3 not in episode.token_ids for episode in report.episodes)


@on_virtual_clock
async def test_a_turn_whose_client_left_is_recorded_exactly_and_not_trained():
    router = TokenRouter()
    sessions = make(router)
    gone = asyncio.ensure_future(sessions.complete(asked((1,), "s", max_tokens=50)))
    await asyncio.sleep(7.5)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await sessions.complete(asked((1,), "s", max_tokens=3))  # asks again
    report = await sessions.close("s", 1.0)
    assert router.num_sampled == 10  # the abort reached the router
    assert (report.turns, report.unseen_turns) == (2, 1)
    assert report.tokens_masked == {"unseen_turn": 7}
    assert report.tokens_trained == 3


def test_a_turn_whose_client_leaves_at_the_moment_of_the_answer_is_unseen():
    class Racing(TokenRouter):
        async def generate(self, request, on_progress=None):
            completion = await super().generate(request, on_progress)
            caller.cancel()
            return completion

    async def scenario():
        nonlocal caller
        sessions = make(Racing())
        caller = asyncio.ensure_future(sessions.complete(asked((1,), "s", max_tokens=3)))
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert (await sessions.close("s", 1.0)).tokens_masked == {"unseen_turn": 3}

    caller = None
    run_virtually(scenario())


@on_virtual_clock
async def test_a_router_that_ignores_an_abort_does_not_delay_the_close(monkeypatch):
    monkeypatch.setattr(sessions_module, "STOP_TIMEOUT_S", 5.0)

    sessions = make(TokenRouter(ignores_aborts=True))
    told = []
    running = asyncio.ensure_future(
        sessions.complete(asked((1,), "s", max_tokens=10**6), told.append)
    )
    await asyncio.sleep(3.5)
    report = await sessions.close("s", 1.0)
    assert await refused(running) == CLOSED
    assert report.tokens_generated == report.tokens_masked["unseen_turn"] == 8
    assert len(told) == 3  # nothing after the close


@on_virtual_clock
async def test_the_tokens_of_a_failed_request_are_discarded_by_a_named_cause():
    router = TokenRouter()
    sessions = make(router)
    task = asyncio.ensure_future(sessions.complete(asked((1,), "s", max_tokens=9), lambda _: None))
    await asyncio.sleep(4.5)
    router.failure = GenerationError("no replica is left")
    with pytest.raises(GenerationError):
        await task
    report = await sessions.close("s", 1.0)
    assert report.turns == 0
    assert report.tokens_discarded == {"generation_error": 4}
    assert report.tokens_pending == 0


@on_virtual_clock
async def test_logprobs_that_are_not_finite_are_masked_and_the_answer_stays_json():
    class Broken(TokenRouter):
        async def generate(self, request, on_progress=None):
            return Completion(
                request_id=request.request_id,
                token_ids=(5, 6, 7),
                logprobs=(-0.5, math.nan, -math.inf),
                version_runs=(VersionRun(0, 1),),
                finish_reason=FinishReason.STOP,
            )

    sessions = make(Broken())
    await sessions.complete(asked((1,), "s"))
    answer = await sessions.handlers()["session.close"]({"session_id": "s", "reward": 1})
    json.dumps(answer, allow_nan=False)
    assert answer["tokens"]["masked"] == {"nonfinite_logprob": 2}
    assert answer["episodes"][0]["loss_mask"] == [False, True, False, False]
    assert answer["episodes"][0]["versions"] == [-1, 1, -1, -1]


@on_virtual_clock
async def test_a_session_has_the_given_id_or_a_random_one():
    sessions = make()
    open_ = sessions.handlers()["session.open"]
    names = {(await open_({}))["session_id"] for _ in range(3)}
    assert len(names) == 3
    assert all(len(name) == 32 for name in names)
    assert (await open_({"session_id": "mine"}))["session_id"] == "mine"
    assert await refused(open_({"session_id": "mine"})) == (400, "session_exists")
    await sessions.close("mine")
    assert await refused(open_({"session_id": "mine"})) == CLOSED


@on_virtual_clock
async def test_a_session_is_refused_before_it_holds_too_many_tokens():
    sessions = make(max_held_tokens=20)
    await sessions.complete(asked((1,) * 8, "s", max_tokens=4))
    assert await refused(sessions.complete(asked((1,) * 9, "s"))) == (400, "session_full")
    await sessions.complete(asked((1,) * 8, "s", max_tokens=4))
    assert await refused(sessions.complete(asked((1,), "s"))) == (400, "session_full")
    await sessions.complete(asked((1,) * 9, "another", max_tokens=1))
    assert (await sessions.close("s", 1.0)).tokens_trained == 8


@on_virtual_clock
async def test_all_sessions_together_hold_a_bounded_number_of_tokens_and_a_close_frees_them():
    full = (429, "sessions_full")
    sessions = make(max_total_tokens=3 * (TURN_TOKENS + 10))
    await sessions.complete(asked((1,) * 8, "a", max_tokens=2))
    running = asyncio.ensure_future(sessions.complete(asked((1,) * 8, "b", max_tokens=13)))
    await asyncio.sleep(1)  # what it may come to is taken from its beginning
    assert await refused(sessions.complete(asked((1,) * 8, "a", max_tokens=2))) == full
    assert await refused(sessions.complete(asked((1,) * 8, "c", max_tokens=2))) == full
    assert await refused(sessions.handlers()["session.open"]({})) == full
    assert sorted(sessions._open) == ["a", "b"]  # a refused request opens none
    await sessions.close("b", 0.0)  # in the middle of its request
    assert await refused(running) == CLOSED
    assert sessions.counts()["session_tokens_held"] == TURN_TOKENS + 10
    for name in ("a", "c"):
        await sessions.complete(asked((1,) * 8, name, max_tokens=2))
    await sessions.complete(asked((1,) * 8, max_tokens=1))  # of no session: it is not kept
    assert (await sessions.close("a", 1.0)).tokens_trained == 4
    assert (await sessions.close("c", 1.0)).tokens_trained == 2
    assert sessions.counts()["session_tokens_held"] == 0


@on_virtual_clock
async def test_top_logprobs_go_to_the_client_and_are_not_kept():
    class Logprobs(TokenRouter):
        def _completion(self, request, tokens, reason):
            whole = super()._completion(request, tokens, reason)
            return replace(whole, top_logprobs=tuple(((7, -1.0),) for _ in tokens))

    sessions = make(Logprobs())
    answer = await sessions.complete(asked((1,), "s", max_tokens=2, num_logprobs=1))
    assert answer.top_logprobs == (((7, -1.0),),) * 2
    (turn,) = sessions._open["s"].recording.turns
    assert turn.completion == replace(answer, top_logprobs=())


@on_virtual_clock
async def test_at_the_end_all_sessions_and_their_requests_end():
    sessions = make()
    await sessions.complete(asked((1,), "idle", max_tokens=2))
    running = asyncio.ensure_future(sessions.complete(asked((1,), "s", max_tokens=50)))
    await asyncio.sleep(3.5)
    await sessions.aclose()
    assert await refused(running) == CLOSED
    assert await refused(sessions.complete(asked((1,), "new"))) == (503, "shutting_down")
    counts = sessions.counts()
    assert counts["sessions_shutdown"] == 2
    assert counts["session_tokens_discarded"] == counts["session_tokens_generated"] == 5


@on_virtual_clock
async def test_a_choice_that_a_response_does_not_have_is_refused_with_those_that_it_has() -> None:
    sessions = Sessions(TokenRouter())
    session_id = sessions.open("one")
    for name in ("0_chatcmpl-1-01234567", "1_chatcmpl-1-89abcdef"):
        await sessions.complete(replace(asked((1,), session_id), request_id=name))
    with pytest.raises(RefusedError, match=r"'chatcmpl-1' has no choice 5 \(0 to 1\)"):
        sessions.reward_branch(session_id, 1.0, response_id="chatcmpl-1", choice=5)
    with pytest.raises(RefusedError, match="session 'one' has no response 'chatcmpl-2'"):
        sessions.reward_branch(session_id, 1.0, response_id="chatcmpl-2", choice=0)
