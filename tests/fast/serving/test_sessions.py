"""Sessions: exact turns, endings, refusals, and token counts that add up."""

from __future__ import annotations

import asyncio
import json
import math

from tests.support.agents import TokenRouter, asked
from tests.support.async_tests import on_virtual_clock
from tests.support.served_sessions import CLOSED, TIMEOUT_S, make, refused
from torchtitan_rl.serving.recording import TURN_TOKENS
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
async def test_an_idle_session_is_abandoned_and_its_turns_are_freed():
    sessions = make()
    await sessions.complete(asked((1,), "s", max_tokens=3))
    await asyncio.sleep(TIMEOUT_S - 1)
    assert sessions.read("s").ending is None
    longer = int(TIMEOUT_S) + 9
    await sessions.complete(asked((1,), "s", max_tokens=longer))  # used again: time starts anew
    await asyncio.sleep(TIMEOUT_S - 1)
    assert sessions.read("s").ending is None
    await asyncio.sleep(2)
    assert sessions.read("s").ending == "abandoned"
    assert sessions.read("s").tokens_discarded == {"abandoned": 3 + longer}
    assert sessions.counts()["sessions_abandoned"] == 1
    assert not sessions._open
    assert await refused(sessions.complete(asked((1,), "s"))) == CLOSED
    assert await refused(sessions.close("s", 1.0)) == CLOSED  # the reward comes too late


@on_virtual_clock
async def test_a_session_that_a_rollout_had_before_a_resume_is_closed():
    sessions = make()
    assert await refused(sessions.complete(asked((1,), "torchtitan-rollout-1"))) == CLOSED
    assert not sessions._open


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
