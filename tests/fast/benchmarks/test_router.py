"""The simulated replica on a virtual clock, and what the router's benchmark makes of it."""

from __future__ import annotations

import asyncio
import random

import pytest

from benchmarks.router import STRATEGIES, _request, balance_of, decide
from benchmarks.simulated_replica import SimulatedReplica, Speeds
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.types import GenerationRequest, SamplingParams

SPEEDS = Speeds(prefill_s=0.01, step_s=1.0, token_s=0.5, max_running=2, cache_tokens=1000)


def request(
    name: str, *, prompt: int = 1, new: int, session: str | None = None
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=(0,) * prompt,
        sampling=SamplingParams(max_tokens=new),
        session_id=session or name,
    )


def ends(*starts: tuple[float, GenerationRequest]) -> tuple[dict[str, float], SimulatedReplica]:
    """When each request, given at its time, ended."""
    ended: dict[str, float] = {}

    async def run() -> SimulatedReplica:
        replica = SimulatedReplica("replica0", SPEEDS)

        async def one(at_s: float, given: GenerationRequest) -> None:
            await asyncio.sleep(at_s)
            completion = await replica.generate(given)
            assert len(completion.token_ids) == given.sampling.max_tokens
            ended[given.request_id] = asyncio.get_running_loop().time()

        await asyncio.gather(*(one(*start) for start in starts))
        return replica

    replica = run_virtually(run())
    return ended, replica


def test_a_request_alone_takes_its_prompt_and_its_steps():
    ended, replica = ends((0.0, request("a", prompt=100, new=4)))
    assert ended["a"] == pytest.approx(1.0 + 4 * 1.5)
    assert replica.busy_s == pytest.approx(7.0)


def test_requests_side_by_side_share_steps_that_take_longer():
    ended, _ = ends((0.0, request("a", new=2)), (0.0, request("b", new=4)))
    assert ended["a"] == pytest.approx(0.02 + 2 * 2.0)
    assert ended["b"] == pytest.approx(0.02 + 2 * 2.0 + 2 * 1.5)


def test_nobody_samples_while_a_prompt_is_read():
    ended, _ = ends((0.0, request("a", new=4)), (3.01, request("b", prompt=200, new=1)))
    # Two of a's steps are done; then b's prompt, and one step together.
    assert ended["b"] == pytest.approx(0.01 + 3.0 + 2.0 + 2.0)
    assert ended["a"] == pytest.approx(ended["b"] + 1.5)


def test_who_finds_no_place_waits_for_one():
    ended, _ = ends(*((0.0, request(name, new=2)) for name in "abc"))
    assert ended["c"] == pytest.approx(0.02 + 2 * 2.0 + 0.01 + 2 * 1.5)


def test_work_is_not_counted_while_there_is_none():
    _, replica = ends((0.0, request("a", new=1)), (10.0, request("b", new=1)))
    assert replica.busy_s == pytest.approx(2 * 1.51)
    assert replica.busy_until_s == pytest.approx(11.51)


def test_a_session_finds_its_prompt_in_the_cache_unless_it_was_forgotten():
    _, kept = ends(
        (0.0, request("a0", prompt=300, new=100, session="a")),
        (500.0, request("a1", prompt=450, new=1, session="a")),
    )
    assert (kept.prompt_tokens, kept.cached_tokens) == (750, 400)
    _, forgotten = ends(
        (0.0, request("a0", prompt=300, new=100, session="a")),
        (500.0, request("b0", prompt=700, new=1)),
        (900.0, request("a1", prompt=450, new=1, session="a")),
    )
    assert forgotten.cached_tokens == 0


def test_every_strategy_does_the_same_work_and_sticky_finds_most_of_it_cached():
    balance = {
        name: run_virtually(balance_of(strategy(), 8, 200, 5.0))
        for name, strategy in STRATEGIES.items()
    }
    assert len({(one.requests, one.sampled_tokens) for one in balance.values()}) == 1
    assert balance["sticky"].requests == 600
    assert balance["sticky"].cached_share > 2 * balance["round-robin"].cached_share
    for one in balance.values():
        assert one.busiest_over_mean >= 1.0
        assert one.slowest_over_mean >= 1.0
        assert one.latency_p50_s < one.latency_p99_s < one.done_s


def test_balance_is_the_same_each_time():
    first, second = (
        run_virtually(balance_of(STRATEGIES["sticky"](), 4, 60, 5.0)) for _ in range(2)
    )
    assert (first.done_s, first.cached_share) == (second.done_s, second.cached_share)


def test_decisions_leave_the_load_of_the_calls_that_are_held():
    chance = random.Random(0)
    requests = [_request(chance, session, turn=0) for session in range(50)]
    decided = {
        name: decide(strategy(), 16, requests, decisions=400, seed=0)
        for name, strategy in STRATEGIES.items()
    }
    assert decided["least loaded"].heaviest_over_mean < decided["round-robin"].heaviest_over_mean
    assert all(one.decisions_per_second > 0 for one in decided.values())
