import asyncio

import pytest

from torchtitan_rl.aio import background
from torchtitan_rl.errors import ReplicaError
from torchtitan_rl.observability.engine import EngineSampler, engine_metrics, idle_metrics, load_of
from torchtitan_rl.observability.sinks import check_names
from torchtitan_rl.types import EngineStats


def stats(running: int, *, waiting: int = 0, kv_use: float = 0.0, rate: float = 0.0) -> EngineStats:
    return EngineStats(
        version=0,
        running=running,
        waiting=waiting,
        kv_use=kv_use,
        kv_tokens=1000,
        preemptions=3,
        generated_tokens=0,
        tokens_per_second=rate,
        steps=0,
    )


IDLE = stats(0)


def test_loads_are_summed_over_replicas_and_averaged_over_the_time_in_which_one_works() -> None:
    readings = [
        {"a": IDLE, "b": IDLE},
        {"a": stats(4, waiting=2, kv_use=0.5, rate=100), "b": stats(2, kv_use=0.1, rate=50)},
        {"a": stats(2, kv_use=0.2, rate=50), "b": IDLE},
        {"a": IDLE, "b": IDLE},
    ]
    metrics = engine_metrics([load_of(reading) for reading in readings])
    check_names(metrics)
    assert metrics == pytest.approx(
        {
            "engine/replicas": 2,
            "engine/preemptions": 6,
            "engine/kv_cache_tokens": 2000,
            "engine/running_mean": 4,
            "engine/running_max": 6,
            "engine/waiting_mean": 1,
            "engine/waiting_max": 2,
            "engine/kv_use_mean": 0.2,
            "engine/kv_use_max": 0.5,
            "engine/tokens_per_second": 100,
        }
    )


def test_a_replica_is_idle_while_it_has_no_request_and_a_reserved_one_does_not_count() -> None:
    readings = [{"a": IDLE, "b": stats(2), "c": IDLE}, {"a": stats(0, waiting=1), "b": stats(1)}]

    def idle(*reserved: str) -> dict[str, float]:
        return idle_metrics([load_of(reading, reserved) for reading in readings])

    metrics = idle()
    check_names(metrics)
    assert metrics == {"overlap/generator_idle_share": pytest.approx(2 / 5)}
    assert idle("c") == {"overlap/generator_idle_share": 1 / 4}
    assert idle("a", "b", "c") == idle_metrics([]) == {}


def test_a_replica_that_does_not_answer_is_counted_and_sampling_goes_on() -> None:
    async def sample() -> tuple[dict[str, float], dict[str, float]]:
        calls = 0
        enough = asyncio.Event()

        async def read() -> dict[str, EngineStats]:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise ReplicaError("replica a is lost")
            if calls == 4:
                enough.set()
                await asyncio.Event().wait()
            return {"a": stats(calls)}

        sampler = EngineSampler(read, interval_s=0.0)
        async with background(sampler.run()):
            await enough.wait()
            first = sampler.take()
        return first, sampler.take()

    first, then = asyncio.run(sample())
    check_names(first)
    assert (first["engine/failed_readings"], first["engine/running_mean"]) == (1, 2)
    assert then == {"engine/failed_readings": 0}
