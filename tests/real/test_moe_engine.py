"""Policies with experts on vLLM: weights pulled in place, judged by `transformers`."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.real.models import NUM_VERSIONS, hf_experts, tiny_model, versions
from tests.real.runs import run_module
from tests.real.test_lora_engine import check_sides
from tests.real.test_vllm_engine import (
    LONG_PROMPT,
    PROMPT,
    PULL_STEP,
    REPEATED_PROMPT,
    SPECULATIVE_PULL_STEP,
    TOLERANCE,
    logprob_error,
)
from torchtitan_rl.routed_experts import to_array
from torchtitan_rl.types import Completion

FAMILIES = ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.soak)]


@pytest.fixture(scope="module", params=FAMILIES)
def root(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Versions of a policy whose experts vLLM pads: their size is no multiple of 32."""
    root = tmp_path_factory.mktemp("moe-engine")
    for version, path in enumerate(versions(root)):
        tiny_model(path, family=request.param, seed=version, tied=False, expert_size=48, std=0.1)
    return root


@pytest.fixture(scope="module")
def pulled(root: Path) -> dict[str, Any]:
    return run("pulled", root)


@pytest.fixture(scope="module")
def speculative(root: Path) -> dict[str, Any]:
    return run("speculative", root)


def run(mode: str, root: Path, *, ranks: int = 1) -> dict[str, Any]:
    run_module("tests.real.moe_scenarios", mode, str(root), ranks=ranks, OMP_NUM_THREADS="1")
    seen: dict[str, Any] = pickle.loads((root / f"{mode}.pickle").read_bytes())
    return seen


def test_an_engine_after_four_pulls_equals_a_fresh_one(pulled: dict[str, Any], root: Path) -> None:
    for name, fresh in pulled["fresh"].items():
        assert pulled["third"][name].token_ids == fresh.token_ids
        assert pulled["third"][name].logprobs == fresh.logprobs
    for name, prompt in (("greedy", PROMPT), ("seeded", PROMPT), ("long", LONG_PROMPT)):
        done = pulled["third"][name]
        assert logprob_error(root / "v3", done, prompt) < TOLERANCE
        for version in range(NUM_VERSIONS - 1):
            assert logprob_error(root / f"v{version}", done, prompt) > 0.05


def test_a_request_that_runs_through_a_pull_goes_on_with_the_new_weights(
    pulled: dict[str, Any], root: Path
) -> None:
    check_sides(pulled["mixed"], root / "v0", root / "v1")


def test_experts_of_each_token_are_those_of_transformers(
    pulled: dict[str, Any], root: Path
) -> None:
    """With prefixes from the cache; the weights are those with which each token was computed."""
    for name, prompt in (("greedy", PROMPT), ("seeded", PROMPT), ("long", LONG_PROMPT)):
        require_experts(pulled["third"][name], prompt, [(0, root / "v3")])
    sides = [(0, root / "v0"), (PULL_STEP, root / "v1")]
    for name, prompt in (("greedy", PROMPT), ("greedy-long", LONG_PROMPT), ("unseeded", PROMPT)):
        require_experts(pulled["mixed"][name], prompt, sides)


def test_experts_of_a_preempted_request_are_those_of_its_first_computation(
    pulled: dict[str, Any], root: Path
) -> None:
    assert pulled["preemptions"] > 12  # of which at most 12 by the pull
    for done in pulled["crowded"].values():
        sides = [(start, root / f"v{version}") for start, version in done.version_runs]
        require_experts(done, PROMPT, sides)


def test_experts_of_a_request_that_keeps_its_kv_cache_at_a_pull(
    pulled: dict[str, Any], root: Path
) -> None:
    """Its tokens after the pull are computed from keys and values of the old weights."""
    old, new = root / "v0", root / "v1"
    kept = pulled["kept"]
    done = kept["first"]
    _, after = done.version_runs
    begin = len(LONG_PROMPT) + after.start - 1
    token_ids = (LONG_PROMPT + done.token_ids)[:-1]
    parts = (old, token_ids[:begin]), (new, token_ids[begin:])
    assert (experts_of(done) == hf_experts(*parts)).all()
    # The cache matters, or the line above would prove nothing.
    assert (experts_of(done)[begin:] != hf_experts((new, token_ids))[begin:]).any()
    require_experts(kept["second"], LONG_PROMPT, [(0, old)])  # with a cached prefix
    require_experts(kept["third"], LONG_PROMPT, [(0, new)])


def test_experts_of_a_prompt_that_is_computed_in_chunks(pulled: dict[str, Any], root: Path) -> None:
    seen, prompt = pulled["chunked"], LONG_PROMPT[1:]
    require_experts(seen["long"], LONG_PROMPT, [(0, root / "v0")])
    require_experts(seen["short"], PROMPT, [(0, root / "v0")])
    assert seen["computed at pull"] == 97  # of two steps: the short request took 31
    token_ids = (prompt + seen["kept"].token_ids)[:-1]
    parts = (root / "v0", token_ids[:97]), (root / "v1", token_ids[97:])
    assert (experts_of(seen["kept"]) == hf_experts(*parts)).all()
    require_experts(seen["recomputed"], prompt, [(0, root / "v2")])


def test_experts_of_a_request_that_goes_on_on_other_engines(
    pulled: dict[str, Any], root: Path
) -> None:
    """Each engine computes all earlier tokens again, with its own weights. The caller has the
    experts of the first 250 tokens."""
    done = pulled["resumed"]
    assert [version for _, version in done.version_runs] == [3, 2, 3]
    sides = [(start, root / f"v{version}") for start, version in done.version_runs]
    require_experts(done, LONG_PROMPT, sides, first=250)


def experts_of(done: Completion) -> Any:
    """Sorted [T, X, K]."""
    assert done.routed_experts is not None
    return np.sort(to_array(done.routed_experts), axis=-1)


def require_experts(
    done: Completion, prompt: tuple[int, ...], runs: list[tuple[int, Path]], *, first: int = 0
) -> None:
    """``runs``: from which sampled token on which policy was used. Those of the ``first`` tokens
    are left out."""
    token_ids = prompt + done.token_ids
    found_TXK = experts_of(done)
    assert len(found_TXK) == len(token_ids) - 1 - first
    starts = [len(prompt) + start - 1 if start else first for start, _ in runs]
    ends = [*starts[1:], len(token_ids) - 1]
    for (_, policy), start, end in zip(runs, starts, ends, strict=True):
        wanted_TXK = hf_experts((policy, token_ids))
        assert (found_TXK[start - first : end - first] == wanted_TXK[start:end]).all()


def test_a_pull_after_which_an_engine_does_not_compute_with_the_published_weights_fails(
    pulled: dict[str, Any],
) -> None:
    """vLLM reports nothing in either case."""
    assert "does not compute with the published weights of" in pulled["not packed again"]
    assert re.search(
        r"published weights of model\.layers\.[01]\.mlp\.experts", pulled["packed parameters"]
    )
    assert "(2 layers)" in pulled["packed parameters"]


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["tp", "ep"])
def test_two_ranks_pull_and_record_the_same_experts(mode: str, root: Path) -> None:
    """With tensor parallelism, without and with vLLM's expert parallelism."""
    seen, sides = run(mode, root, ranks=2), [(0, root / "v0"), (PULL_STEP, root / "v1")]
    check_sides(seen, root / "v0", root / "v1")
    first, second = ({one.request_id: one for one in ended} for ended, _ in seen["ranks"])
    for name, prompt in (("greedy", PROMPT), ("greedy-long", LONG_PROMPT), ("unseeded", PROMPT)):
        require_experts(seen[name], prompt, sides)
        assert first[name].routed_experts == second[name].routed_experts
        assert first[name].routed_experts == seen[name].routed_experts
    for _, error in seen["ranks"]:
        assert "published weights of model.layers.1.mlp.experts" in error


@pytest.mark.soak
@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_experts_of_requests_for_which_an_engine_drafts_tokens(
    method: str, speculative: dict[str, Any], root: Path
) -> None:
    if method not in speculative:
        pytest.skip(
            "vLLM takes a DeepSeek-V3 draft for MTP layers, which a checkpoint may not have"
        )
    seen = speculative[method]
    require_experts(seen["stopped"], PROMPT, [(0, root / "v0")])
    for done in seen["cut"]["repeated"]:
        require_experts(done, REPEATED_PROMPT, [(0, root / "v0")])
    prompts = (("repeated", REPEATED_PROMPT), ("seeded", PROMPT), ("unseeded", PROMPT))
    for name, prompt in prompts:
        sides = [(start, root / f"v{version}") for start, version in seen[name].version_runs]
        assert len(sides) == 2
        require_experts(seen[name], prompt, sides)
    # Drafts are accepted and rejected, or the lines above would prove nothing.
    assert seen["repeated"].version_runs[1].start > SPECULATIVE_PULL_STEP
    assert seen["seeded"].version_runs[1].start < 2 * SPECULATIVE_PULL_STEP


@pytest.mark.soak
def test_an_engine_that_computes_on_latent_vectors_after_a_pull(tmp_path: Path) -> None:
    """As engines on CUDA do. On a CPU, vLLM's kernel is for one size."""
    old, new, *_ = versions(tmp_path)
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    for seed, path in enumerate((old, new)):
        tiny_model(path, family="deepseek_v3", seed=seed, tied=False, std=0.1, changes=sizes)
    seen = run("latent", tmp_path)
    for name, prompt in (("greedy", PROMPT), ("seeded", PROMPT), ("long", LONG_PROMPT)):
        done, fresh = seen["pulled"][name], seen["fresh"][name]
        assert done.token_ids == fresh.token_ids
        # Only a pull packs kv_b_proj on a CPU, so prefills round differently.
        assert done.logprobs == pytest.approx(fresh.logprobs, abs=1e-5)
        assert logprob_error(new, done, prompt) < TOLERANCE
        assert logprob_error(old, done, prompt) > 0.05
