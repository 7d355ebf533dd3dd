"""Seeds of requests, and calls of user code."""

from __future__ import annotations

import asyncio
import contextvars
import threading

import pytest

from torchtitan_rl.rollout.calls import call, compute
from torchtitan_rl.rollout.group_settings import request_seed


def test_seeds_are_the_same_in_every_process_and_version():
    assert request_seed(0, "g0/r0", 0) == 7547325789847896400


def test_seeds_differ_by_run_rollout_and_turn():
    seeds = {
        request_seed(run, f"g{group}/r{i}", turn)
        for run in range(5)
        for group in range(5)
        for i in range(5)
        for turn in range(5)
    }
    assert len(seeds) == 5**4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_plain_functions_run_in_another_thread_and_async_ones_do_not():
    async def async_thread():
        return threading.get_ident()

    async def scenario():
        return await call(threading.get_ident), await call(async_thread)

    plain, on_loop = asyncio.run(scenario())
    assert on_loop == threading.get_ident() != plain


def test_a_plain_function_may_return_an_awaitable_and_sees_the_callers_context():
    variable = contextvars.ContextVar("variable", default=0)

    async def add(a, b):
        return a + b + variable.get()

    async def scenario():
        variable.set(10)
        return await call(lambda: add(1, variable.get()))

    assert asyncio.run(scenario()) == 21


@pytest.mark.parametrize(("error", "seen"), [(KeyError, KeyError), (StopIteration, RuntimeError)])
def test_errors_come_back_from_threads(error, seen):
    def fail():
        raise error("x")

    with pytest.raises(seen):
        asyncio.run(call(fail))


def test_the_result_of_a_thread_is_dropped_after_a_timeout():
    release, ended = threading.Event(), threading.Event()

    def hang():
        release.wait()
        ended.set()

    async def scenario():
        async with asyncio.timeout(0.01):
            await call(hang)

    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
    release.set()  # its result comes after the loop has closed, and is dropped
    assert ended.wait(60)


def test_compute_runs_in_two_other_threads():
    async def scenario():
        return await asyncio.gather(*(compute(threading.get_ident) for _ in range(50)))

    threads = set(asyncio.run(scenario()))
    assert threading.get_ident() not in threads
    assert len(threads) <= 2
