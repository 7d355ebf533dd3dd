from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.async_tests import on_virtual_clock
from tests.support.endpoints import (
    HEALTHY,
    Generator,
    LinkedEndpoint,
    ends_of,
    request,
)
from torchtitan_rl.channel import End
from torchtitan_rl.errors import (
    GenerationError,
    GenerationTimeoutError,
    InvalidRequestError,
    ReplicaError,
)
from torchtitan_rl.serving.bridge import EndpointBridge
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import ControllerLink

INTERVAL_S = 0.05


@dataclass
class Served:
    """A bridge at work between an endpoint and a generator."""

    link: ControllerLink
    endpoint: LinkedEndpoint
    generator: Generator
    bridge: EndpointBridge
    running: asyncio.Task[None]


@contextlib.asynccontextmanager
async def served(
    generator: Generator | None = None, *, latency_s: float = 0.0
) -> AsyncIterator[Served]:
    async def versions(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        await asyncio.sleep(0.1)
        return {"newest": 3, **arguments}

    async def resume(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        raise RefusedError(400, "invalid_request", "not paused")

    async def lease(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        await asyncio.Event().wait()
        return {}

    link = ControllerLink()
    link.attach()
    endpoint, generator = LinkedEndpoint(link, latency_s=latency_s), generator or Generator()
    bridge = EndpointBridge(
        endpoint,
        complete=generator.complete,
        handlers={"versions": versions, "resume": resume, "problem.lease": lease},
        status=lambda: HEALTHY,
        interval_s=INTERVAL_S,
    )
    running = asyncio.create_task(bridge.run())
    await bridge.ready()
    try:
        yield Served(link, endpoint, generator, bridge, running)
    finally:
        running.cancel()
        await asyncio.wait([running])
        link.close()


@on_virtual_clock
async def test_batches_are_an_interval_apart_under_load() -> None:
    async with served(Generator(step_s=0.001), latency_s=0.01) as system:
        for index in range(20):
            system.link.submit(request(f"r{index}", max_tokens=400), streams=True)
        await ends_of(system.link, 20)
        begun = [at for at, _ in system.endpoint.sent]
        gaps = [later - earlier for earlier, later in itertools.pairwise(begun)]
        # Before the requests came and after they ended nothing was to be gathered.
        assert min(gaps[1:-1]) >= INTERVAL_S - 1e-9
        # 8,000 tokens, and a message for each interval only.
        assert len(begun) <= 0.4 / INTERVAL_S + 4


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequestError("max_tokens is 0"), 400, "invalid_request"),
        (GenerationTimeoutError("waited for replica7 on host b"), 504, "timeout"),
        (ReplicaError("replica7 on host b died"), 503, "no_replica"),
        (GenerationError("replica7 on host b died"), 503, "no_replica"),
        (RefusedError(400, "session_closed", "closed"), 400, None),
        (ZeroDivisionError("in replica7"), 500, "internal_error"),
    ],
)
@on_virtual_clock
async def test_errors_become_refusals_without_internals(
    error: Exception, status: int, code: str | None
) -> None:
    async with served(Generator(fails=lambda request_id: error)) as system:
        system.link.submit(request("a"))
        refusal = (await ends_of(system.link, 1))["a"].error
        assert refusal is not None
        assert refusal.status == status
        assert refusal.code == (code or "session_closed")
        assert "replica7" not in refusal.message
        assert system.bridge.counts.by_refusal == {refusal.code: 1}


CLIENTS = st.lists(
    st.tuples(
        st.floats(0.0, 3.0),  # begins at
        st.integers(0, 12),  # tokens
        st.booleans(),  # streams
        st.none() | st.floats(0.0, 2.0),  # leaves so long after
        st.booleans(),  # fails
    ),
    min_size=1,
    max_size=20,
)


@settings(deadline=None, max_examples=30)
@given(clients=CLIENTS, latency_s=st.sampled_from([0.0, 0.01, 0.3]))
@on_virtual_clock
async def test_each_request_that_is_not_aborted_has_one_end_and_its_progress_begins_its_completion(
    clients: list[tuple[float, int, bool, float | None, bool]], latency_s: float
) -> None:
    failing = {f"r{index}" for index, client in enumerate(clients) if client[4]}

    def fails(request_id: str) -> Exception | None:
        return GenerationError("no") if request_id in failing else None

    generator = Generator(fails=fails)
    async with served(generator, latency_s=latency_s) as system:
        left: set[str] = set()

        async def client(index: int) -> None:
            begins_s, num_tokens, streams, leaves_s, _ = clients[index]
            name = f"r{index}"
            await asyncio.sleep(begins_s)
            system.link.submit(request(name, max_tokens=num_tokens), streams=streams)
            if leaves_s is not None:
                await asyncio.sleep(leaves_s)
                if name not in ends:
                    left.add(name)
                    system.link.abort([name])

        ends: dict[str, Any] = {}
        tokens: dict[str, list[int]] = {}

        async def take() -> None:
            while True:
                for one in await system.link.next_outputs():
                    if isinstance(one, End):
                        assert one.call_id not in ends
                        assert one.call_id not in left
                        ends[str(one.call_id)] = one
                        continue
                    assert one.request_id not in ends
                    known = tokens.setdefault(one.request_id, [])
                    assert one.start == len(known)
                    known.extend(one.token_ids)

        taking = asyncio.create_task(take())
        await asyncio.gather(*(client(index) for index in range(len(clients))))
        await asyncio.sleep(30.0)
        taking.cancel()
        await asyncio.wait([taking])
        assert taking.cancelled()
        assert set(ends) | left == {f"r{index}" for index in range(len(clients))}
        for name, end in ends.items():
            assert (end.error is not None) == (name in failing)
            if end.result is not None:
                known = tokens.get(name, [])
                assert known == list(end.result.token_ids[: len(known)])
        assert system.bridge.num_running == 0
        assert not generator.running
        assert len(generator.asked) == len(set(generator.asked))
