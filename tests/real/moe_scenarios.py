"""Runs vLLM engines with experts (MoE) in a process of its own and saves what it saw, as
`vllm_scenarios` does: ``python -m tests.real.moe_scenarios pulled DIR`` or ``speculative DIR``,
``latent DIR``, and under torchrun ``tp DIR`` or ``ep DIR``."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.real.models import versions
from tests.real.resume_scenarios import cut_everywhere, greedy, run_all
from tests.real.vllm_scenarios import (
    LONG_PROMPT,
    NGRAM,
    REPEATED_PROMPT,
    SPECULATIVE_PULL_STEP,
    Checkpoints,
    TriggeredEngine,
    build,
    idle_pull,
    kept_kv,
    mixed,
    play,
    probes,
    request,
    save,
)

# isort: split
from vllm.model_executor.layers import utils

from torchtitan_rl.backends.vllm import engine
from torchtitan_rl.config.model import read_architecture, read_policy_facts
from torchtitan_rl.errors import LoopFailedError, WeightSyncError
from torchtitan_rl.generation.decision import Pull
from torchtitan_rl.routing.continuation import PartialTokens, remaining_request
from torchtitan_rl.types import Completion, VersionRun


def engine_of(root: Path, version: int = 0) -> TriggeredEngine:
    paths = versions(root)
    return build(paths[version], Checkpoints(paths))


def pulled(root: Path) -> dict[str, Any]:
    # An engine takes the process's groups with it when it goes, so this one stays.
    refused, _own = pulled_into_packed_parameters(root)
    seen: dict[str, Any] = {"packed parameters": refused}
    pulling = engine_of(root)
    seen |= {"kept": kept_kv(pulling)}  # with a pull of version 1
    idle_pull(pulling, 0)
    seen |= {"mixed": mixed(pulling)}  # with a pull of version 1
    idle_pull(pulling, 3)
    seen["third"] = probes(pulling)
    # Nothing steps an engine after a later one is gone, which takes the process's groups with it.
    seen["chunked"], seen["resumed"] = chunked(root, pulling)
    seen["fresh"] = probes(engine_of(root, version=3))
    seen["crowded"], seen["preemptions"] = crowded(root)
    with patch.object(engine, "repack", lambda model: None):
        seen["not packed again"] = refused_pull(pulling)
    return seen


def crowded(root: Path) -> tuple[dict[str, Any], int]:
    """Requests that preempt one another, with a pull between, on a cache that is too small."""
    paths = versions(root)
    size = 4 * 1024 * read_policy_facts(paths[0]).kv_values("cpu", 1)  # of 1,024 tokens
    engine = build(paths[0], Checkpoints(paths), kv_cache_bytes=size)
    requests = [request(f"{number}", 200, seed=number) for number in range(12)]
    done = play(engine, requests, triggers=lambda loop: {60: lambda: loop.execute(Pull(1))})
    return done, engine.stats().preemptions


def chunked(root: Path, other: TriggeredEngine) -> tuple[dict[str, Any], Completion]:
    """Prompts that are computed in chunks of 64 tokens, two of them with a pull between two chunks;
    then a request that goes from ``other`` to this engine and back."""
    paths = versions(root)
    chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}
    engine = build(paths[0], Checkpoints(paths), vllm=chunks)
    seen: dict[str, Any] = run_all(engine, [greedy("long", LONG_PROMPT), greedy("short")])
    for version, name in enumerate(("kept", "recomputed"), 1):
        for item in (greedy("short"), greedy(name, LONG_PROMPT[1:])):
            engine.add_request(item, arrival_s=0.0)
        for _ in range(2):
            engine.step()
        if name == "kept":
            requests = engine._core.scheduler.requests.values()
            seen["computed at pull"] = max(one.num_computed_tokens for one in requests)
        engine.swap_weights(version)
        engine.reset_prefix_cache(recompute_running=name == "recomputed")
        seen[name] = run_all(engine, [])[name]
    return seen, resumed([other, engine, other])


def resumed(engines: list[TriggeredEngine]) -> Completion:
    """A request that each engine continues; the second one is lost after two reports."""
    whole = replace(greedy("resumed", LONG_PROMPT, max_tokens=48), routed_from=250)
    so_far = PartialTokens(whole)
    for number, one in enumerate(engines):
        piece = remaining_request(whole, so_far.ended, attempt=number)
        assert piece is not None
        runs = (VersionRun(0, one.stats().version),)
        so_far.start_piece(piece.request_id)
        one.add_request(piece, arrival_s=0.0)
        if number == len(engines) - 1:
            (done,) = run_all(one, []).values()
            so_far.end_piece(replace(done, version_runs=runs))
            break
        for start, end in ((0, 5), (5, 16)):
            while one.generated_lengths()[piece.request_id] < end:
                one.step()
            for progress in one.sampled_since({piece.request_id: start}):
                so_far.add_progress(replace(progress, version_runs=runs))
        (cut,) = one.abort((piece.request_id,))
        if number == 1:
            so_far.lose_piece()
        else:
            so_far.end_piece(replace(cut, version_runs=runs))
    return so_far.ended


def speculative(root: Path) -> dict[str, Any]:
    draft = {"method": "draft_model", "model": str(root / "v0"), "num_speculative_tokens": 4}
    if read_architecture(root / "v0").latent is not None:
        return {NGRAM["method"]: drafted(root, NGRAM)}
    # The last one is ngram, as in `vllm_scenarios.solo`.
    return {one["method"]: drafted(root, one) for one in (draft, NGRAM)}


def drafted(root: Path, config: dict[str, Any]) -> dict[str, Any]:
    """An engine that drafts tokens: requests with a pull in mid-flight, one that a stop string ends
    within the tokens of a step, and one that is cut and goes on."""
    paths = versions(root)
    engine = build(paths[0], Checkpoints(paths), vllm={"speculative_config": config})
    letters = {"allowed_token_ids": [65, 66]}
    stopped = greedy("stopped", stop=("b", "c"), min_tokens=20, engine_options=letters)
    seen: dict[str, Any] = run_all(engine, [stopped])
    seen["cut"] = cut_everywhere(engine, [greedy("repeated", REPEATED_PROMPT)], stride=9)
    # Of two tokens only, ngram finds what follows in whatever a policy answers.
    few = {"engine_options": letters} if config is NGRAM else {}
    items = [
        request("repeated", 60, prompt=REPEATED_PROMPT, temperature=0.0, **few),
        request("seeded", seed=11),
        request("unseeded"),
    ]
    return seen | play(
        engine,
        items,
        triggers=lambda loop: {SPECULATIVE_PULL_STEP: lambda: loop.execute(Pull(1))},
    )


def pulled_into_packed_parameters(root: Path) -> tuple[str, TriggeredEngine]:
    """The first engine of the process, with vLLM's own packing of experts: a pull writes into the
    packed parameters."""
    with patch.object(engine, "keep_expert_weights", lambda: None):
        own = engine_of(root)
        with patch.object(engine, "repack", repack_linears):
            return refused_pull(own), own


def latent(root: Path) -> dict[str, Any]:
    """An engine that computes attention on latent vectors, as on CUDA."""
    os.environ["VLLM_MLA_DISABLE"] = "0"
    paths, backend = versions(root), {"attention_backend": "CPU_MLA"}  # AMX's deletes the weights
    pulling = build(paths[0], Checkpoints(paths), vllm=backend)
    idle_pull(pulling, 1)
    seen: dict[str, Any] = {"pulled": probes(pulling)}
    seen["fresh"] = probes(build(paths[1], Checkpoints(paths), vllm=backend))
    return seen


def repack_linears(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def refused_pull(pulling: TriggeredEngine) -> str:
    try:
        idle_pull(pulling, 1)
    except LoopFailedError as error:
        return str(error)
    return ""


def tp(root: Path, vllm: dict[str, Any] | None = None) -> dict[str, Any]:
    """`mixed` on two ranks; then, of each rank, its engine's completions, and the error of a pull
    after which experts are not packed again."""
    from torchtitan_rl.backends.vllm.engine import GlooLockstep

    paths = versions(root)
    one = build(paths[0], Checkpoints(paths), tensor_parallel=2, vllm=vllm)
    seen, error = mixed(one, GlooLockstep(timeout_s=120.0)), ""
    with patch.object(engine, "repack", repack_linears):
        try:
            one.swap_weights(2)
        except WeightSyncError as refused:
            error = str(refused)
    ranks: list[Any] = [None, None]
    torch.distributed.all_gather_object(ranks, (one.ended, error))
    return seen | {"ranks": ranks}


def ep(root: Path) -> dict[str, Any]:
    return tp(root, {"enable_expert_parallel": True})


if __name__ == "__main__":
    mode, root = sys.argv[1], Path(sys.argv[2])
    modes = {"pulled": pulled, "speculative": speculative, "latent": latent, "tp": tp, "ep": ep}
    save(root, mode, modes[mode](root))
