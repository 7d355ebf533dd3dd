"""Decoding with drafted tokens against decoding without: tokens per second of one engine.

    python -m benchmarks.speculation [--requests 1 8 64] [--tokens 128] [--repeats 5]

The sides are engines of the same policy, measured alternately on the same core:

- plain: one token of a request in a step;
- ngram: 4 tokens are proposed, those that followed the last 2 or 3 tokens earlier in the request;
- draft model: 4 tokens are proposed by a model, each its most likely one. Here it is the policy
  itself, so no model of its size is accepted more often.

Two kinds of requests: first turns of the alphabet sort task, whose answers repeat names of their
prompts, and prompts of random tokens, in which nothing repeats. All are sampled at temperature 1,
``--tokens`` tokens each. Prints tokens per second, their ratio to the plain engine's, and tokens of
a request in a step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import at_least, core
from benchmarks.report import heading, print_table, write_report
from benchmarks.workers import Worker
from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.cpu import engine_environment
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR, AlphabetSortTask
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.rollout.rendering import load_tokenizer
from torchtitan_rl.types import GenerationRequest, SamplingParams

_DRAFTS = 4
SIDES: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": _DRAFTS,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 3,
    },
    "draft model": {
        "method": "draft_model",
        "model": str(POLICY_DIR),
        "num_speculative_tokens": _DRAFTS,
    },
}


def build_engine(speculative: Mapping[str, Any]) -> Callable[[str, Any], Any]:
    """An engine loop in this process, called with prompts and a number of tokens. Answers with
    seconds, sampled tokens, and the tokens of a request in a step."""
    from torchtitan_rl.backends.vllm.engine import VllmEngine
    from torchtitan_rl.generation.loop import EngineLoop, start_loop

    generator = GeneratorConfig(
        max_model_len=512,
        max_running_requests=64,
        kv_cache_bytes=256 << 20,
        vllm={"speculative_config": dict(speculative)} if speculative else {},
    )
    engines: list[VllmEngine] = []

    def build() -> EngineLoop:
        engines.append(VllmEngine(GeneratorSpec(model=POLICY_DIR, generator=generator)))
        return EngineLoop(engines[0], None, is_leader=True)

    loop = start_loop(build, name="benchmark")

    def side(name: str, argument: Any) -> Any:
        if name == "close":
            return loop.close()
        prompts, num_tokens = argument
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        before, started_s = engines[0].stats().steps, time.perf_counter()
        futures = [
            loop.submit(
                GenerationRequest(request_id=f"{n}", prompt_token_ids=prompt, sampling=sampling)
            )
            for n, prompt in enumerate(prompts)
        ]
        sampled = sum(len(future.result().token_ids) for future in futures)
        seconds, steps = time.perf_counter() - started_s, engines[0].stats().steps - before
        return seconds, sampled, sampled / steps / len(prompts)

    return side


async def task_prompts(number: int) -> list[tuple[int, ...]]:
    """The first prompts of the task's problems."""
    task, tokenizer = AlphabetSortTask(), load_tokenizer(POLICY_DIR)
    dataset = task.dataset("train", seed=0)
    prompts = []
    for _ in range(number):
        problem = dataset.next()
        environment = task.environment(problem, tokenizer=tokenizer, limits=RolloutConfig())
        prompts.append(tuple((await environment.reset()).prompt_token_ids))
    return prompts


def random_prompts(number: int) -> list[tuple[int, ...]]:
    rng = random.Random(0)
    return [tuple(rng.randrange(100, 250) for _ in range(60)) for _ in range(number)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=at_least(1), nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=at_least(1), default=128)
    parser.add_argument("--repeats", type=at_least(1), default=5)
    parser.add_argument("--core", type=core, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/speculation.json"))
    options = parser.parse_args()
    report = heading(options)
    most = max(options.requests)
    kinds = {"task": asyncio.run(task_prompts(most)), "random": random_prompts(most)}
    workloads: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        workers = {
            side: stack.enter_context(
                Worker(
                    build_engine,
                    config,
                    cores=(options.core,),
                    environment=engine_environment(1, "cpu"),
                )
            )
            for side, config in SIDES.items()
        }
        for worker in workers.values():
            worker.wait_until_built()
            worker.call("run", (kinds["task"][:2], 8))
        for kind, prompts in kinds.items():
            for number in options.requests:
                given = prompts[:number], options.tokens
                measured: dict[str, list[tuple[float, int, float]]] = {side: [] for side in SIDES}
                for _ in range(options.repeats):
                    for side, worker in workers.items():
                        measured[side].append(worker.call("run", given)[0])
                workloads[f"{kind}, {number}"] = summary(measured)
    print_table(["requests", "side", "tokens/s", "to plain", "tokens/step"], rows(workloads))
    write_report(options.output, report | {"workloads": workloads})


def summary(measured: Mapping[str, Sequence[tuple[float, int, float]]]) -> dict[str, Any]:
    """Medians of each side. Ratios are those of measurements that followed each other."""
    speeds = {side: [n / seconds for seconds, n, _ in runs] for side, runs in measured.items()}
    return {
        side: {
            "tokens_per_second": statistics.median(speeds[side]),
            "to_plain": statistics.median(
                one / plain for one, plain in zip(speeds[side], speeds["plain"], strict=True)
            ),
            "tokens_per_step": statistics.median(per_step for _, _, per_step in runs),
        }
        for side, runs in measured.items()
    }


def rows(workloads: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            name,
            side,
            f"{row['tokens_per_second']:,.0f}",
            f"{row['to_plain']:.2f}",
            f"{row['tokens_per_step']:.2f}",
        ]
        for name, sides in workloads.items()
        for side, row in sides.items()
    ]


if __name__ == "__main__":
    main()
