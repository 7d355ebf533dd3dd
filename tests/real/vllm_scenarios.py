"""Runs vLLM engines through scripted scenarios in a process of its own and saves what it saw.

``python -m tests.real.vllm_scenarios solo DIR`` and ``torchrun ... tp DIR``: importing vLLM costs
more than all scenarios together, so one process plays many, and the tests judge the pickle.
Engine steps trigger pulls, aborts and submissions, so everything happens at exact tokens.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn
from unittest.mock import patch

from torchtitan_rl.backends.vllm.cpu import engine_environment, installed_device
from torchtitan_rl.generation.commands import Pull

os.environ.update(engine_environment(1, installed_device()))

import torch

from tests.real.models import hf_tensors, tiny_model
from tests.real.pause_scenarios import frozen, paused_by_abort
from tests.real.resume_scenarios import (
    alternatives,
    cut_everywhere,
    greedy,
    progress,
    refused_alongside_a_neighbour,
    run_all,
    sensitive_requests,
    truncated_requests,
)
from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.arguments import engine_arguments
from torchtitan_rl.backends.vllm.engine import VllmEngine
from torchtitan_rl.config.lora import AdapterFolder, LoraConfig
from torchtitan_rl.errors import EngineMemoryError, LoopFailedError
from torchtitan_rl.generation.config import GeneratorConfig, LoopConfig
from torchtitan_rl.generation.decision import KvPolicy, LockstepChannel
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.types import Completion, GenerationRequest, SamplingParams

PROMPT = tuple(range(40, 70))
LONG_PROMPT = tuple(40 + index % 97 for index in range(300))  # some full prefix blocks
PULL_STEP, ABORT_STEP, SPECULATIVE_PULL_STEP = 20, 30, 8
CUT_STRIDE = 3
WAIT_S = 120.0
INCOMPLETE = 1000  # a version
FAMILIES = ("qwen2", "llama", "mistral")  # next to Qwen3, which plays all scenarios
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 3,
}
REPEATED_PROMPT = tuple(40 + index % 7 for index in range(100))


class Checkpoints:
    """Staged weights: version v is the checkpoint at ``paths[v % len(paths)]``; `INCOMPLETE` lacks
    most tensors."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def tensors(self, version: int) -> Mapping[str, torch.Tensor]:
        if version == INCOMPLETE:
            return {"model.norm.weight": torch.ones(64)}
        return hf_tensors(self._paths[version % len(self._paths)])


class TriggeredEngine:
    """Passes everything on to ``engine``; ``triggers[n]`` runs inside its n-th step from reset,
    and ``ended`` has the completions of all steps."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self.triggers: dict[int, Callable[[], object]] = {}
        self.ended: list[Completion] = []
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> Any:
        self.steps += 1
        if trigger := self.triggers.pop(self.steps, None):
            trigger()
        ended = self._engine.step()
        self.ended += ended
        return ended

    def close(self) -> None:
        """The engine is used again by the next loop."""


def checkpoints(root: Path) -> dict[str, Path]:
    """Old and new weights, tied and untied; the untied ones are stored in bfloat16."""
    paths = {}
    for seed, age in enumerate(("old", "new")):
        paths[f"tied-{age}"] = root / f"tied-{age}"
        paths[f"untied-{age}"] = root / f"untied-{age}"
        if is_leader() and not paths[f"untied-{age}"].exists():
            tiny_model(paths[f"tied-{age}"], tied=True, seed=seed)
            tiny_model(paths[f"untied-{age}"], tied=False, seed=seed, dtype="bfloat16")
            for family in FAMILIES:
                tiny_model(
                    root / f"{family}-{age}", family=family, seed=seed, hidden_size=128, std=0.1
                )
    return paths


def build(
    path: Path,
    weights: object,
    *,
    tensor_parallel: int = 1,
    kv_cache_bytes: int = 32 << 20,
    dtype: Literal["float32", "bfloat16"] = "float32",
    sleeps: bool = False,
    vllm: dict[str, Any] | None = None,
    lora: LoraConfig | None = None,
    adapters: tuple[AdapterFolder, ...] = (),
    profile_dir: Path | None = None,
) -> TriggeredEngine:
    """On CUDA, ``kv_cache_bytes`` holds too; several engines fit into a device. With a
    ``profile_dir``, version 1 is profiled."""
    generator = GeneratorConfig(
        tensor_parallel=tensor_parallel,
        kv_cache_bytes=kv_cache_bytes,
        max_running_requests=16,
        gpu_memory_utilization=0.2,
        vllm=vllm or {},
    )
    spec = GeneratorSpec(
        model=path,
        generator=generator,
        seed=3,
        device=installed_device(),
        dtype=dtype,
        sleeps=sleeps,
        lora=lora,
        adapters=adapters,
        records_routing=True,  # of a policy with experts
        profiled_versions=(1,) if profile_dir else (),
        profile_dir=profile_dir or Path(),
    )
    arguments = engine_arguments(spec) | {"kv_cache_memory_bytes": kv_cache_bytes}
    with patch("torchtitan_rl.backends.vllm.engine.engine_arguments", lambda _: arguments):
        return TriggeredEngine(VllmEngine(spec, weights))  # type: ignore[arg-type]


def request(
    name: str, max_tokens: int = 48, prompt: tuple[int, ...] = PROMPT, **sampling: Any
) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **sampling})
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=params)


def make_loop(
    engine: TriggeredEngine, channel: LockstepChannel | None = None, **config: Any
) -> EngineLoop:
    engine.steps = 0
    return EngineLoop(engine, channel, is_leader=is_leader(), config=LoopConfig(**config))


def is_leader() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def play(
    engine: TriggeredEngine,
    requests: list[GenerationRequest],
    *,
    triggers: Callable[[EngineLoop], dict[int, Callable[[], object]]] = lambda loop: {},
    **config: Any,
) -> dict[str, Any]:
    """All requests in one decision, on a loop of their own; their completions by id."""
    loop = make_loop(engine, max_steps_per_decision=1, **config)
    engine.triggers = triggers(loop)
    futures = {item.request_id: loop.submit(item) for item in requests}
    loop.start()
    done = {name: future.result(WAIT_S) for name, future in futures.items()}
    loop.close()
    return done


def mixed_requests() -> list[GenerationRequest]:
    return [
        request("greedy", temperature=0.0),
        request("greedy-long", prompt=LONG_PROMPT, temperature=0.0),
        request("seeded", seed=11),
        request("seeded-warm", seed=12, temperature=0.7),
        request("unseeded"),
        request("aborted", seed=13),
    ]


def mixed(engine: TriggeredEngine, channel: LockstepChannel | None = None) -> dict[str, Any]:
    """Mixed requests with a pull of version 1 and an abort in mid-flight."""
    loop = make_loop(engine, channel, max_steps_per_decision=1, name="mixed")
    if not is_leader():
        loop.start()
        loop.join()
        assert loop.failure is None, loop.failure
        return {}
    pulls = []
    engine.triggers = {
        PULL_STEP: lambda: pulls.append(loop.execute(Pull(1))),
        ABORT_STEP: lambda: loop.abort(("aborted",)),
    }
    futures = {item.request_id: loop.submit(item) for item in mixed_requests()}
    loop.start()
    done: dict[str, Any] = {name: future.result(WAIT_S) for name, future in futures.items()}
    done["report"] = pulls[0].result(WAIT_S)
    loop.close()
    return done


def short_after_long(engine: TriggeredEngine) -> list[str]:
    """The order in which two requests end, the short one submitted 5 steps later."""
    ended: list[str] = []
    loop = make_loop(engine)
    futures = []

    def submit(item: GenerationRequest) -> None:
        future = loop.submit(item)
        future.add_done_callback(lambda done: ended.append(done.result().request_id))
        futures.append(future)

    engine.triggers = {5: lambda: submit(request("short", 3))}
    submit(request("long", 64))
    loop.start()
    futures[0].result(WAIT_S)
    loop.close()
    return ended


def kept_kv(engine: TriggeredEngine) -> dict[str, Any]:
    """Three requests of one prompt: ``first`` runs through a pull that keeps its KV, ``second``
    comes before that pull, ``third`` after it."""
    loop = make_loop(
        engine, max_steps_per_decision=1, kv_policy=KvPolicy(recompute_running=False), version=0
    )
    futures: dict[str, Any] = {}
    options: dict[str, Any] = {"prompt": LONG_PROMPT, "temperature": 0.0}

    def submit(name: str, max_tokens: int) -> None:
        futures[name] = loop.submit(request(name, max_tokens, **options))

    engine.triggers = {
        5: lambda: submit("second", 4),
        20: lambda: futures.update(report=loop.execute(Pull(1))),
        25: lambda: submit("third", 20),
    }
    submit("first", 60)
    loop.start()
    futures["first"].result(WAIT_S)
    seen = {name: future.result(WAIT_S) for name, future in futures.items()}
    loop.close()
    return seen


def idle_pull(engine: TriggeredEngine, version: int) -> Any:
    loop = make_loop(engine)
    loop.start()
    report = loop.execute(Pull(version)).result(WAIT_S)
    loop.close()
    return report


def probes(engine: TriggeredEngine) -> dict[str, Any]:
    """What two engines with equal weights must answer alike."""
    return play(
        engine,
        [
            request("greedy", temperature=0.0),
            request("seeded", seed=21),
            request("long", 20, prompt=LONG_PROMPT, seed=22),
        ],
    )


def scored(engine: TriggeredEngine) -> dict[str, Any]:
    """Prompts whose tokens are scored, alongside a sampled request; one prompt twice, so that its
    blocks are in the prefix cache."""
    params = {"with_logprobs": False, "prompt_logprobs": 8}
    requests = [
        request("sampled", seed=7),
        request("scored", 1, prompt=LONG_PROMPT, **params),
        request("scored again", 1, prompt=LONG_PROMPT, **params),
        request("own only", 1, prompt=PROMPT, with_logprobs=False, prompt_logprobs=0),
    ]
    return play(engine, requests)


def stops(engine: TriggeredEngine) -> dict[str, Any]:
    whole = play(engine, [request("whole", 40, seed=5)])["whole"]
    stop = whole.token_ids[9]
    limited = [
        request("stop", 40, seed=5, stop_token_ids=(stop,)),
        request("min", 40, seed=5, stop_token_ids=(stop,), min_tokens=20),
        *(request(f"eos-{seed}", 400, ignore_eos=False, seed=seed) for seed in range(6)),
    ]
    return {"whole": whole, **play(engine, limited)}


def paused(engine: TriggeredEngine) -> dict[str, Any]:
    """The same greedy requests undisturbed, frozen and cut, on weights that stay the same."""
    few = [item for item in mixed_requests() if item.request_id in ("greedy", "seeded")]
    many = [
        request(
            f"r{n}",
            60 + 20 * n,
            tuple(40 + (n + i) % 97 for i in range(5 + 20 * n)),
            temperature=0.0,
        )
        for n in range(12)
    ]
    seen = {"undisturbed": play(engine, [*few, *many])}
    loop = make_loop(engine, max_steps_per_decision=1, name="frozen")
    seen["frozen"] = frozen(loop, engine, few)
    loop.close()
    seen["cut"] = paused_by_abort(make_loop(engine, name="cut"), many)
    return seen


def chunked(paths: list[Path]) -> dict[str, Any]:
    """An engine that computes prompts in chunks of 64 tokens, as CUDA engines do in larger ones.
    Without seeds, because vLLM cannot do both on a CPU."""
    chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}
    engine = build(paths[0], Checkpoints(paths), vllm=chunks)
    seen: dict[str, Any] = {"cut": cut_everywhere(engine, sensitive_requests(engine), stride=9)}
    long = greedy("long", LONG_PROMPT)
    kept = greedy("kept", LONG_PROMPT[1:], temperature=0.7, top_k=5)
    seen |= run_all(engine, [long, kept, greedy("short")])
    for name in ("aborted", "pulled"):
        engine.add_request(greedy(name, LONG_PROMPT[2:]), arrival_s=0.0)
    for _ in range(2):
        assert engine.step() == []
    seen["lengths"] = engine.generated_lengths()
    seen["aborted"] = engine.abort(("aborted",))[0]
    engine.swap_weights(1)
    engine.reset_prefix_cache(recompute_running=True)
    return seen | run_all(engine, [])


def incomplete_pull(engine: TriggeredEngine) -> Any:
    loop = make_loop(engine)
    loop.start()
    try:
        loop.execute(Pull(INCOMPLETE)).result(WAIT_S)
    except LoopFailedError as error:
        return str(error.__cause__)
    return None


def soak(root: Path) -> dict[str, Any]:
    """400 requests through a small engine with a pull every 23 steps, aborts, and preemptions."""
    paths = checkpoints(root)
    weights = Checkpoints([paths["tied-old"], paths["tied-new"]])
    engine = build(paths["tied-old"], weights, kv_cache_bytes=2 << 20)
    rng = random.Random(0)
    loop = make_loop(engine, max_steps_per_decision=4)
    requests = [
        request(
            f"r{number}",
            rng.randint(1, 100),
            tuple(rng.randrange(256) for _ in range(rng.randint(1, 300))),
            seed=number if number % 2 else None,
            temperature=rng.choice((0.0, 0.7, 1.0)),
        )
        for number in range(400)
    ]
    pulls: list[Any] = []
    for step in range(23, 4000, 23):
        version = step // 23
        engine.triggers[step] = lambda version=version: pulls.append(loop.execute(Pull(version)))
    for step in range(31, 4000, 31):
        names = tuple(f"r{rng.randrange(400)}" for _ in range(3))
        engine.triggers.setdefault(step, lambda names=names: loop.abort(names))
    futures = [loop.submit(item) for item in requests]
    loop.start()
    done = [(item, future.result(600.0)) for item, future in zip(requests, futures, strict=True)]
    seen = {"done": done, "reports": [pull.result(WAIT_S) for pull in pulls if pull.done()]}
    loop.close()
    return {**seen, "stats": engine.stats()}


def speculative(root: Path) -> dict[str, Any]:
    """Requests of an engine that drafts tokens, so that a step samples several of a request."""
    paths = checkpoints(root)
    weights = Checkpoints([paths["tied-old"], paths["tied-new"]])
    engine = build(paths["tied-old"], weights, vllm={"speculative_config": NGRAM})
    items = [
        item
        for item in sensitive_requests(engine)
        if "logit_bias" not in item.sampling.engine_options
    ]
    seen: dict[str, Any] = {"cut": cut_everywhere(engine, items, stride=13)}
    cuts = [item for item in truncated_requests() if not item.sampling.min_p]
    seen["truncated"] = run_all(engine, cuts)
    counted, engine.steps = engine.stats().generated_tokens, 0
    letters = {"allowed_token_ids": [65, 66]}
    stopped = [
        greedy(f"b or c after {size}", stop=("b", "c"), min_tokens=size, engine_options=letters)
        for size in range(20, 25)
    ]
    seen["stopped"] = run_all(engine, stopped)
    seen["stopped steps"] = engine.steps
    seen["stopped tokens"] = engine.stats().generated_tokens - counted
    repeated: dict[str, Any] = {"prompt": REPEATED_PROMPT, "temperature": 0.2, "num_logprobs": 1}
    engine.steps = 0
    seen["many"] = run_all(engine, [request(f"{n}", 40, seed=n, **repeated) for n in range(32)])
    seen["many steps"] = engine.steps
    seen["seeded"] = play(engine, [request("seeded", seed=11)])["seeded"]
    together = [
        request("repeated", 60, prompt=REPEATED_PROMPT, temperature=0.0),
        request("seeded", seed=11),
        request("seeded-warm", seed=12, temperature=0.7, num_logprobs=2),
        request("unseeded"),
    ]
    seen["mixed"] = play(
        engine,
        together,
        triggers=lambda loop: {SPECULATIVE_PULL_STEP: lambda: loop.execute(Pull(1))},
    )
    return seen


def pulled(root: Path, family: str, *, tensor_parallel: int = 1) -> dict[str, Any]:
    """`mixed` on another family's old and new weights."""
    from torchtitan_rl.backends.vllm.engine import GlooLockstep

    old, new = (root / f"{family}-{age}" for age in ("old", "new"))
    engine = build(old, Checkpoints([old, new]), tensor_parallel=tensor_parallel)
    return mixed(engine, GlooLockstep(timeout_s=120.0) if tensor_parallel > 1 else None)


def without_memory(path: Path) -> str:
    """The error of an engine whose cache is too small for one request."""
    try:
        build(path, None, kv_cache_bytes=64 << 10)
    except EngineMemoryError as error:
        return str(error)
    return ""


def solo(root: Path) -> dict[str, Any]:
    paths = checkpoints(root)
    no_memory = without_memory(paths["tied-old"])
    weights = Checkpoints([paths["tied-old"], paths["tied-new"]])
    tied = build(paths["tied-old"], weights, profile_dir=root / "profile")
    seen: dict[str, Any] = {"no memory": no_memory}
    seen |= {"order": short_after_long(tied), "stops": stops(tied)}
    seen["seeded-alone"] = play(tied, [request("seeded", seed=11)])["seeded"]
    seen["seeded-in-company"] = play(tied, mixed_requests())["seeded"]
    seen["seeded-same-weights"] = play(
        tied,
        [request("seeded", seed=11)],
        triggers=lambda loop: {PULL_STEP: lambda: loop.execute(Pull(0))},
    )["seeded"]
    seen["scored"] = scored(tied)
    seen["paused"] = paused(tied)
    # Every third token: a stop string of four is cut inside.
    seen["cut"] = cut_everywhere(tied, sensitive_requests(tied), stride=CUT_STRIDE)
    seen["truncated"] = run_all(tied, truncated_requests())
    seen["left over"] = dict(tied._kept_sets._sets)
    seen["progress"] = progress(tied, greedy("read", num_logprobs=2))
    both = [greedy("with"), greedy("without", with_logprobs=False)]
    seen["without-logprobs"] = run_all(tied, both)
    seen["refused"] = refused_alongside_a_neighbour(tied)
    seen["kept"] = kept_kv(tied)
    seen["idle-report"] = idle_pull(tied, 0)
    seen["mixed"] = mixed(tied)
    seen["stats"] = tied.stats()
    seen["updated-tied"] = probes(tied)
    # An engine takes the process's groups with it when it goes, so nothing steps this one later.
    seen["alternatives"] = alternatives(tied, str(paths["tied-new"]))
    seen["chunked"] = chunked([paths["tied-old"], paths["tied-new"]])
    seen["fresh-tied"] = probes(build(paths["tied-new"], None))
    untied = build(paths["untied-old"], Checkpoints([paths["untied-old"], paths["untied-new"]]))
    seen["untied-before"] = probes(untied)
    idle_pull(untied, 1)
    seen["updated-untied"] = probes(untied)
    seen["incomplete-pull"] = incomplete_pull(untied)
    seen["fresh-untied"] = probes(build(paths["untied-new"], None))
    seen["families"] = {family: pulled(root, family) for family in FAMILIES}
    # The last one: vLLM cannot build another engine in a process that has loaded numba.
    seen["speculative"] = speculative(root)
    return seen


def tp(root: Path) -> dict[str, Any]:
    from torchtitan_rl.backends.vllm.engine import GlooLockstep

    paths = checkpoints(root)
    weights = Checkpoints([paths["tied-old"], paths["tied-new"]])
    engine = build(paths["tied-old"], weights, tensor_parallel=2)
    channel = GlooLockstep(timeout_s=120.0)
    seen: dict[str, Any] = {"cut": cut_everywhere(engine, sensitive_requests(engine), stride=13)}
    seen["truncated"] = run_all(engine, truncated_requests())
    seen["mixed"] = mixed(engine, channel)
    seen["shm"] = [path.name for path in Path("/dev/shm").iterdir()]
    # A second loop on the same ranks: a tied head is updated under TP as well.
    loop = make_loop(engine, channel, version=1)
    futures = {}
    if is_leader():
        items = [request("greedy", temperature=0.0), request("seeded", seed=21)]
        futures = {item.request_id: loop.submit(item) for item in items}
    loop.start()
    seen["updated"] = {name: future.result(WAIT_S) for name, future in futures.items()}
    if futures:
        loop.close()
    loop.join(WAIT_S)
    loop = make_loop(engine, channel, version=1, max_steps_per_decision=3)
    if is_leader():
        items = [request("greedy", temperature=0.0), request("seeded", seed=21)]
        seen["frozen"] = frozen(loop, engine, items)
        loop.close()
    else:
        loop.start()
    loop.join(WAIT_S)
    assert loop.failure is None, loop.failure
    return seen


def tp_qwen2(root: Path) -> dict[str, Any]:
    """A process can have one tensor-parallel engine only."""
    checkpoints(root)
    return pulled(root, "qwen2", tensor_parallel=2)


def save(root: Path, mode: str, observed: Any) -> NoReturn:
    """Write what one rank saw, and end without the engines' own ends, which take seconds each."""
    if is_leader():
        (root / f"{mode}.pickle").write_bytes(pickle.dumps(observed))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    mode, root = sys.argv[1], Path(sys.argv[2])
    save(root, mode, {"solo": solo, "tp": tp, "tp_qwen2": tp_qwen2, "soak": soak}[mode](root))
