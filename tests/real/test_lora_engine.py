"""Adapters on vLLM, after steps of the real trainer: pulled in place, judged by `transformers`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.real.lora_scenarios import LORA
from tests.real.models import tiny_model
from tests.real.runs import run_module
from tests.real.test_vllm_engine import (
    LONG_PROMPT,
    PROMPT,
    PULL_STEP,
    TOLERANCE,
    logprob_error,
)
from tests.real.trainer_helpers import random_batch, trainer
from torchtitan_rl.config.checks import CPU_BLOCK_TOKENS
from torchtitan_rl.training.config import OptimizerConfig
from torchtitan_rl.types import VersionRun

FAST = OptimizerConfig(learning_rate=0.02)  # so that versions are far apart


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy, and the adapter and the merged policy after each of three optimizer steps."""
    root = tmp_path_factory.mktemp("lora")
    tiny_model(root / "base")
    with trainer(root / "base", lora=LORA, optimizer=FAST) as policy_trainer:
        for version in (1, 2, 3):
            policy_trainer.train_step(random_batch(seed=version))
            policy_trainer.export_hf(root / f"v{version}" / "policy")
    return root


@pytest.fixture(scope="module")
def pulled(root: Path) -> dict[str, Any]:
    return run("pulled", root)


def run(mode: str, root: Path, *, ranks: int = 1) -> dict[str, Any]:
    run_module("tests.real.lora_scenarios", mode, str(root), ranks=ranks, OMP_NUM_THREADS="1")
    seen: dict[str, Any] = pickle.loads((root / f"{mode}.pickle").read_bytes())
    return seen


def policy(root: Path, version: int) -> Path:
    return root / f"v{version}" / "policy" if version else root / "base"


def test_the_initial_policy_is_the_base(pulled: dict[str, Any], root: Path) -> None:
    assert logprob_error(policy(root, 0), pulled["before"]["seeded"]) < TOLERANCE


def test_logprobs_after_three_steps_with_pulls_are_those_of_the_trainer(
    pulled: dict[str, Any], root: Path
) -> None:
    for name, prompt in (("greedy", PROMPT), ("seeded", PROMPT), ("long", LONG_PROMPT)):
        done = pulled["third"][name]
        assert logprob_error(policy(root, 3), done, prompt) < TOLERANCE
        for version in (0, 1, 2):
            assert logprob_error(policy(root, version), done, prompt) > 0.05


def check_sides(seen: dict[str, Any], before: Path, after: Path) -> None:
    """Each token of the requests of `mixed` is sampled from the policy before or after the pull."""
    assert seen["report"].recomputed
    for name, prompt in (("greedy", PROMPT), ("greedy-long", LONG_PROMPT), ("unseeded", PROMPT)):
        done = seen[name]
        assert done.version_runs == (VersionRun(0, 0), VersionRun(PULL_STEP, 1))
        assert logprob_error(before, done, prompt, end=PULL_STEP) < TOLERANCE
        assert logprob_error(after, done, prompt, start=PULL_STEP) < TOLERANCE
        assert logprob_error(before, done, prompt, start=PULL_STEP) > 0.05


def test_a_request_that_runs_through_a_pull_goes_on_with_the_new_adapter(
    pulled: dict[str, Any], root: Path
) -> None:
    """The loop of this scenario counts from version 0; its engine has version 2."""
    check_sides(pulled["mixed"], policy(root, 2), policy(root, 1))


def test_no_request_reads_prefixes_of_an_earlier_adapter(
    pulled: dict[str, Any], root: Path
) -> None:
    kept = pulled["kept"]
    cached = len(LONG_PROMPT) // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS
    assert kept["second"].metrics.cached_tokens == cached
    assert kept["third"].metrics.cached_tokens == 0
    assert logprob_error(policy(root, 1), kept["third"], LONG_PROMPT) < TOLERANCE
    # The running request kept its KV.
    assert logprob_error(policy(root, 1), kept["first"], LONG_PROMPT, start=21) > 1e-3


def test_an_engine_after_several_pulls_equals_one_that_pulled_only_the_last_version(
    pulled: dict[str, Any],
) -> None:
    for name, fresh in pulled["fresh"].items():
        assert pulled["third"][name].token_ids == fresh.token_ids
        assert pulled["third"][name].logprobs == fresh.logprobs


def test_an_adapter_that_lacks_a_tensor_fails_the_pull_and_leaves_no_file(
    pulled: dict[str, Any],
) -> None:
    assert "not those of an adapter of rank 4" in pulled["incomplete"]
    assert pulled["shm"] == []


def test_two_adapters_and_the_base_in_one_batch_are_each_as_alone(
    pulled: dict[str, Any], root: Path
) -> None:
    served = pulled["served"]
    assert len(served["together"]) == 24
    for name, done in served["together"].items():
        model, number = name.split("-")
        alone = served[model][name]
        assert done.token_ids == alone.token_ids, name
        assert done.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE), name
        prompt = LONG_PROMPT[: 60 + int(number)]
        path = policy(root, 0 if model == "base" else int(model[1]))
        assert logprob_error(path, done, prompt) < TOLERANCE, name


def test_a_request_of_an_adapter_that_is_not_served_is_refused(pulled: dict[str, Any]) -> None:
    assert "there is no adapter 'v2'" in pulled["served"]["refusal"]


@pytest.mark.soak
def test_tensor_parallel_ranks_with_adapters_generate_what_one_rank_does(
    pulled: dict[str, Any], root: Path
) -> None:
    """Before and after a pull in mid-flight."""
    tp = run("tp", root, ranks=2)
    check_sides(tp, policy(root, 2), policy(root, 1))
    for name in ("greedy", "greedy-long", "seeded", "seeded-warm", "aborted"):
        one, two = pulled["mixed"][name], tp[name]
        assert two.token_ids == one.token_ids
        assert two.version_runs == one.version_runs
        assert two.logprobs == pytest.approx(one.logprobs, abs=TOLERANCE)
