"""The one thread of each rank that builds, steps and closes the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripted_engine import WAIT_S, ScriptedEngine, request
from tests.support.threaded_channel import make_threaded_channels
from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm import engine as vllm_engine
from torchtitan_rl.generation.commands import Pull, Resume, Sleep, WakeUp
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.generation.loop import EngineLoop

CALLS = ("add_request", "abort", "step", "swap_weights", "sleep", "wake_up", "close")


class ThreadNotingEngine(ScriptedEngine):
    """Notes the thread of each call. Takes the arguments of `VllmEngine`."""

    def __init__(self, *_: Any) -> None:
        super().__init__(max_model_len=10**6)
        self.threads = {"constructor": {threading.get_ident()}}
        for call in CALLS:
            setattr(self, call, self._noting(call, getattr(self, call)))
        ENGINES.append(self)

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            self.threads.setdefault(name, set()).add(threading.get_ident())
            return call(*args, **kwargs)

        return noting


ENGINES: list[ThreadNotingEngine] = []


@pytest.fixture(autouse=True)
def noting_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    ENGINES.clear()
    monkeypatch.setattr(vllm_engine, "VllmEngine", ThreadNotingEngine)


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_each_rank_one_thread_builds_steps_updates_and_closes_the_engine(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's current device and vLLM's streams belong to the thread that built the engine."""
    channels = iter(make_threaded_channels(ranks))
    monkeypatch.setattr(vllm_engine, "GlooLockstep", lambda timeout_s: next(channels))
    spec = GeneratorSpec(model=Path(), generator=GeneratorConfig(tensor_parallel=ranks))
    loops = [vllm_engine.start_engine_loop(spec, rank) for rank in range(ranks)]
    leader = loops[0]
    cut = leader.submit(request("a", 900_000))
    leader.execute(Pull(1)).result(WAIT_S)
    leader.execute(Sleep()).result(WAIT_S)
    cut.result(WAIT_S)
    leader.execute(WakeUp()).result(WAIT_S)
    leader.execute(Pull(2)).result(WAIT_S)
    leader.execute(Resume())
    leader.submit(request("b", 2)).result(WAIT_S)
    leader.close(WAIT_S)
    assert all(loop.join(WAIT_S) for loop in loops)
    own = [set.union(*engine.threads.values()) for engine in ENGINES]
    assert [len(threads) for threads in own] == [1] * ranks
    assert len(set.union(*own)) == ranks
    assert threading.get_ident() not in set.union(*own)
    for engine in ENGINES:
        assert engine.threads.keys() == {"constructor", *CALLS}


def test_a_start_raises_the_error_of_an_engine_that_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> EngineLoop:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(vllm_engine, "VllmEngine", refuse)
    with pytest.raises(RuntimeError, match="out of memory"):
        vllm_engine.start_engine_loop(GeneratorSpec(model=Path()), 0)
