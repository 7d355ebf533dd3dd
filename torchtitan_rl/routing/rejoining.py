"""Shows that a replica that joined computes like another one, before it serves.

Both complete the same short prompt greedily at the same policy version, and the token ids must be
equal. The other replica is asked first while it serves: equal tokens are proof enough. If they
differ, rounding that depends on the batch may be the cause, so it is asked again without other
requests, which continue elsewhere or after the probe.

The tokens of probes are in the accounts, as those of an endpoint's clients are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from torchtitan_rl.aio import cancel_all, wait_within
from torchtitan_rl.errors import InvalidRequestError, ReplicaError
from torchtitan_rl.generation.commands import AbortRequests
from torchtitan_rl.routing.replicas import Phase, ReplicaPool, ReplicaState, lost_error
from torchtitan_rl.routing.requests import ABORT_TIMEOUT_S, RequestTracker
from torchtitan_rl.routing.weights import WeightSync
from torchtitan_rl.types import Completion, FinishReason, GenerationRequest, SamplingParams

_NUM_TOKENS = 8  # of the prompt, and of the completion: together no cached block
_ANSWER_TIMEOUT_S = 20.0  # then the probe is aborted
_EQUAL_VERSION_S = 30.0  # for another replica to hold the version
_MAX_ATTEMPTS = 5  # while versions change or pauses abort the probes


class DifferentAnswerError(ReplicaError):
    """A replica that joined answers otherwise than another one with the same weights."""


async def prove(
    pool: ReplicaPool, weights: WeightSync, requests: RequestTracker, state: ReplicaState
) -> str:
    """Compare a replica that joined with another one, if another holds the version. Returns what is
    known, as a clause.

    Raises:
        DifferentAnswerError: the answers differ.
        ReplicaError: the replica is lost.
    """
    for _ in range(_MAX_ATTEMPTS):
        await pool.wait_until(lambda: not pool.is_paused or not state.is_live)
        await pool.wait_until(lambda: _is_decided(pool, state), timeout_s=_EQUAL_VERSION_S)
        if not state.is_live:
            raise lost_error(state)
        other = _other(pool, state)
        if other is None:
            return f"not compared, because no other replica holds version {state.version}"
        begun_s = asyncio.get_running_loop().time()
        try:
            pair = await _ask_both(pool, requests, state, other)
            is_late = asyncio.get_running_loop().time() - begun_s >= _ANSWER_TIMEOUT_S
            if is_late or (_are_comparable(*pair) and not _are_equal(*pair)):
                async with _emptied(pool, weights, requests, other):
                    pair = await _ask_both(pool, requests, state, other)
        except InvalidRequestError as error:
            return f"not compared: {error}"
        except ReplicaError:
            continue  # one of them is lost
        if not _are_comparable(*pair):
            continue
        if not _are_equal(*pair):
            answers = " and ".join(f"{list(one.token_ids)} on {one.replica}" for one in pair)
            error_text = f"{state.name} answers a greedy probe otherwise at version {state.version}"
            raise DifferentAnswerError(f"{error_text}: {answers}")
        return f"answers as {other.name} does at version {state.version}"
    return "not compared, because of pauses or new weights during each attempt"


def _other(pool: ReplicaPool, state: ReplicaState) -> ReplicaState | None:
    """The least loaded replica that serves the same version."""
    found = [
        one
        for one in pool.live_unreserved()
        if one is not state and one.phase is Phase.SERVING and one.version == state.version
    ]
    able = filter(_can_answer, found)
    return min(able, key=lambda one: (one.outstanding_tokens, one.index), default=None)


def _can_answer(state: ReplicaState) -> bool:
    return state.is_proven and not (state.is_pinned or state.is_leaving)


def _is_decided(pool: ReplicaPool, state: ReplicaState) -> bool:
    """Whether the replica can be compared, or cannot be compared soon."""
    others = [one for one in pool.live_unreserved() if one is not state]
    is_alone = not any(_can_answer(one) for one in others)
    can_be = not pool.is_paused and (is_alone or _other(pool, state) is not None)
    return can_be or not state.is_live


def _are_comparable(one: Completion, other: Completion) -> bool:
    """Whether no pause and no new weights came between them."""
    is_whole = FinishReason.ABORT not in (one.finish_reason, other.finish_reason)
    return is_whole and one.version_runs == other.version_runs


def _are_equal(one: Completion, other: Completion) -> bool:
    return one.token_ids == other.token_ids


@asynccontextmanager
async def _emptied(
    pool: ReplicaPool, weights: WeightSync, requests: RequestTracker, state: ReplicaState
) -> AsyncIterator[None]:
    """Keep a replica free of requests and of new weights while the block runs, if it serves."""
    if state.phase is not Phase.SERVING or state.is_pinned:
        yield  # it swaps weights or is pinned by now, so the answers are not comparable
        return
    state.is_pinned = True
    pool.set_phase(state, Phase.DRAINING)
    try:
        await requests.cut(state)
        yield
    finally:
        state.is_pinned = False
        pool.set_phase(state, Phase.SERVING)
        weights.follow(state)


async def _ask_both(
    pool: ReplicaPool, requests: RequestTracker, state: ReplicaState, other: ReplicaState
) -> tuple[Completion, Completion]:
    """Ask two replicas the same new question, whose answer no prefix cache changes; raises as
    `_ask`."""
    number = next(requests.probe_numbers)
    request = GenerationRequest(
        request_id=f"probe/{state.name}/{number}",
        prompt_token_ids=tuple(10 + (7 * number + index) % 32 for index in range(_NUM_TOKENS)),
        sampling=SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True, seed=0),
    )
    own = await _ask(pool, requests, state, request)
    return own, await _ask(pool, requests, other, request)


async def _ask(
    pool: ReplicaPool, requests: RequestTracker, state: ReplicaState, request: GenerationRequest
) -> Completion:
    """Complete a request on this replica, whatever its phase. It is aborted if it takes too long.

    Raises:
        InvalidRequestError: the request was refused.
        ReplicaError: the replica is lost.
    """

    async def sample() -> Completion:
        pool.add_request(state, 0)  # so that the replica does not leave meanwhile
        try:
            done = await state.replica.generate(request)
        finally:
            pool.release_request(state, 0)
        requests.note_answer(state, request, done)
        return done

    sampling = asyncio.ensure_future(pool.answer(state, sample()))
    try:
        if not await wait_within(_ANSWER_TIMEOUT_S, sampling):
            abort = state.replica.execute(AbortRequests((request.request_id,)))
            await pool.ask(state, abort, timeout_s=ABORT_TIMEOUT_S, required="take an abort")
        return await sampling
    except ReplicaError as error:
        pool.mark_dead(state, error)
        raise
    finally:
        if not sampling.done():  # this call was cancelled
            await cancel_all([sampling])
