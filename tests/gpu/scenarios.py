"""Runs engines on the installed device in a process of its own and saves what it saw, as
`tests.real.vllm_scenarios` does. Each engine is built and stepped by one thread, as in a replica.

``python -m tests.gpu.scenarios one DIR``, ``torchrun ... -m tests.gpu.scenarios two DIR``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tests.real.resume_scenarios import greedy, truncated_requests
from tests.real.vllm_scenarios import (
    LONG_PROMPT,
    WAIT_S,
    Checkpoints,
    TriggeredEngine,
    build,
    checkpoints,
    is_leader,
    make_loop,
    mixed_requests,
    request,
    save,
)
from torchtitan_rl.generation.commands import Pull, Resume, Sleep, WakeUp
from torchtitan_rl.generation.loop import EngineLoop, start_loop
from torchtitan_rl.routing.continuation import join, remaining_request
from torchtitan_rl.types import Completion, GenerationRequest

NUM_CROWDED = 12
_ENGINES: list[TriggeredEngine] = []  # one that goes takes the process's groups with it


def started(path: Path, weights: Any, **fields: Any) -> tuple[EngineLoop, TriggeredEngine]:
    def build_loop() -> EngineLoop:
        from torchtitan_rl.backends.vllm.engine import GlooLockstep

        _ENGINES.append(build(path, weights, **fields))
        is_alone = fields.get("tensor_parallel", 1) == 1
        channel = None if is_alone else GlooLockstep(timeout_s=120.0)
        return make_loop(_ENGINES[-1], channel, max_steps_per_decision=1)

    return start_loop(build_loop, name="gpu"), _ENGINES[-1]


def answers(loop: EngineLoop, requests: Iterable[GenerationRequest]) -> dict[str, Completion]:
    futures = {item.request_id: loop.submit(item) for item in requests}
    return {name: future.result(WAIT_S) for name, future in futures.items()}


def pulled(loop: EngineLoop, engine: TriggeredEngine) -> dict[str, Any]:
    """Mixed requests, a pull of version 1 after 20 steps and an abort after 30."""
    pulls: list[Any] = []
    engine.steps = 0
    engine.triggers = {
        20: lambda: pulls.append(loop.execute(Pull(1))),
        30: lambda: loop.abort(("aborted",)),
    }
    done: dict[str, Any] = dict(answers(loop, mixed_requests()))
    return done | {"report": pulls[0].result(WAIT_S)}


def cut(loop: EngineLoop, engine: TriggeredEngine) -> dict[str, tuple[Completion, Completion]]:
    """Greedy requests undisturbed, and cut by an abort and continued."""
    items = [greedy("short"), greedy("long", prompt=LONG_PROMPT)]
    whole, joined = answers(loop, items), {}
    for item in items:
        engine.steps, engine.triggers = 0, {11: partial(loop.abort, (item.request_id,))}
        (part,) = answers(loop, [item]).values()
        rest = remaining_request(item, part, attempt=1)
        assert rest is not None
        (end,) = answers(loop, [rest]).values()
        joined[item.request_id] = join(item.request_id, [part, end])
    return {name: (whole[name], joined[name]) for name in joined}


def slept(loop: EngineLoop, version: int) -> None:
    for command in (Sleep(), WakeUp(), Pull(version), Resume()):
        loop.execute(command).result(WAIT_S)  # type: ignore[arg-type]


def crowd() -> list[GenerationRequest]:
    prompts = [tuple(40 + (n + i) % 97 for i in range(100)) for n in range(NUM_CROWDED)]
    return [greedy(f"r{n}", prompt, max_tokens=120) for n, prompt in enumerate(prompts)]


def probes() -> list[GenerationRequest]:
    return [request("greedy", temperature=0.0), request("long", 20, LONG_PROMPT, temperature=0.0)]


def one(root: Path) -> dict[str, Any]:
    paths = checkpoints(root)
    weights = Checkpoints([paths["tied-old"], paths["tied-new"]])
    # The only engine that sleeps: vLLM frees the memory of all sleeping engines of a process.
    loop, engine = started(paths["tied-old"], weights, sleeps=True)
    seen: dict[str, Any] = {"truncated": answers(loop, truncated_requests())}
    both = [greedy("with"), greedy("without", with_logprobs=False)]
    seen |= {"without-logprobs": answers(loop, both), "cut": cut(loop, engine)}
    seen |= {"crowd": answers(loop, crowd()), "mixed": pulled(loop, engine)}
    slept(loop, 1)
    seen["woken"] = answers(loop, probes())
    loop.close()
    loop, _ = started(paths["tied-new"], None)
    seen["fresh"] = answers(loop, probes())
    loop.close()
    loop, engine = started(paths["tied-old"], None, kv_cache_bytes=1 << 20)
    seen |= {"crowded": answers(loop, crowd()), "stats": engine.stats()}
    loop.close()
    loop, _ = started(paths["tied-old"], None, dtype="bfloat16")
    seen["rounded"] = answers(loop, [request(f"r{n}", seed=n) for n in range(16)])
    loop.close()
    return seen


def two(root: Path) -> dict[str, Any]:
    paths = checkpoints(root)
    weights = Checkpoints([paths["tied-old"], paths["tied-new"]])
    loop, engine = started(paths["tied-old"], weights, tensor_parallel=2)
    seen = {}
    if is_leader():
        seen = {"crowd": answers(loop, crowd()), "mixed": pulled(loop, engine)}
        loop.close()
    loop.join(WAIT_S)
    assert loop.failure is None, loop.failure
    return seen


if __name__ == "__main__":
    mode, folder = sys.argv[1], Path(sys.argv[2])
    save(folder, mode, {"one": one, "two": two}[mode](folder))
