"""Policies with experts on vLLM: weights pulled in place, judged by `transformers`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.real.models import tiny_model
from tests.real.moe_scenarios import NUM_VERSIONS, versions
from tests.real.runs import run_module
from tests.real.test_lora_engine import check_sides
from tests.real.test_vllm_engine import LONG_PROMPT, PROMPT, TOLERANCE, logprob_error


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions of a policy whose experts vLLM pads: their size is no multiple of 32."""
    root = tmp_path_factory.mktemp("moe-engine")
    for version, path in enumerate(versions(root)):
        tiny_model(path, family="qwen3_moe", seed=version, tied=False, expert_size=48, std=0.1)
    return root


@pytest.fixture(scope="module")
def pulled(root: Path) -> dict[str, Any]:
    return run("pulled", root)


def run(mode: str, root: Path, *, ranks: int = 1) -> dict[str, Any]:
    run_module("tests.real.moe_scenarios", mode, str(root), ranks=ranks, OMP_NUM_THREADS="1")
    seen: dict[str, Any] = pickle.loads((root / f"{mode}.pickle").read_bytes())
    return seen


def test_an_engine_after_three_pulls_equals_a_fresh_one(pulled: dict[str, Any], root: Path) -> None:
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


def test_a_pull_after_which_an_engine_does_not_compute_with_the_published_weights_fails(
    pulled: dict[str, Any],
) -> None:
    """vLLM reports nothing in either case."""
    assert "does not compute with the published weights of" in pulled["not packed again"]
    assert "published weights of model.layers.0.mlp.experts" in pulled["packed parameters"]
    assert "(2 layers)" in pulled["packed parameters"]


@pytest.mark.soak
def test_tensor_parallel_ranks_pull_the_same_experts(root: Path) -> None:
    check_sides(run("tp", root, ranks=2), root / "v0", root / "v1")
