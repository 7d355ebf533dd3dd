"""An engine on the installed device, judged by `transformers`, the trainer and other engines."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.real.models import VOCAB_SIZE, hf_logprobs, tiny_tokenizer
from tests.real.resume_scenarios import PROMPT, TEMPERATURE
from tests.real.runs import run_module
from tests.real.trainer_helpers import trainer
from tests.real.vllm_scenarios import LONG_PROMPT
from tests.support import turns
from torchtitan_rl.backends.vllm.cpu import installed_device
from torchtitan_rl.orchestration.batching import GrammarReplay
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import Completion, FinishReason, Turn

IS_CUDA = installed_device() == "cuda"
TOLERANCE = 2e-4 if IS_CUDA else 1e-5  # float32 on both sides
# What these tests show of an engine on a CPU, tests/real/test_vllm_engine.py does, too.
pytestmark = [] if IS_CUDA else [pytest.mark.soak]
MAX_MEAN_ROUNDING = 0.1 if IS_CUDA else TOLERANCE  # engine and trainer in bfloat16; a CPU: float32


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def seen(root: Path) -> dict[str, Any]:
    return run("one", root, ranks=1)


def run(mode: str, root: Path, *, ranks: int) -> dict[str, Any]:
    run_module("tests.gpu.scenarios", mode, str(root), ranks=ranks, OMP_NUM_THREADS="1")
    return pickle.loads((root / f"{mode}.pickle").read_bytes())


def check_logprobs_of_both_versions(root: Path, mixed: dict[str, Any]) -> None:
    assert mixed["report"].version == 1
    for name, prompt in (("greedy", PROMPT), ("greedy-long", LONG_PROMPT), ("unseeded", PROMPT)):
        done = mixed[name]
        assert [run.version for run in done.version_runs] == [0, 1], name
        border = done.version_runs[1].start
        for model, tokens in (("old", slice(0, border)), ("new", slice(border, None))):
            expected = hf_logprobs(
                root / f"tied-{model}", prompt + done.token_ids, num_prompt=len(prompt)
            )
            assert done.logprobs[tokens] == pytest.approx(expected[tokens], abs=TOLERANCE), name
    assert mixed["aborted"].finish_reason is FinishReason.ABORT


def check_same(found: dict[str, Completion], expected: dict[str, Completion]) -> None:
    assert found.keys() == expected.keys()
    for name, done in expected.items():
        assert found[name].token_ids == done.token_ids, name
        assert found[name].logprobs == pytest.approx(done.logprobs, abs=TOLERANCE), name


def batch_of(completions: list[Completion], *, temperature: float) -> TrainingBatch:
    replay = GrammarReplay(tiny_tokenizer(), VOCAB_SIZE)
    episodes = []
    for done in completions:
        rollout = turns.rollout(Turn(prompt_token_ids=PROMPT, completion=done))
        episodes += [replay(episode) for episode in rollout_to_episodes(rollout, 1.0)]
    batch = pack_episodes(episodes, row_len=96, temperature=temperature).batch
    assert batch is not None
    return batch


def test_tokens_before_and_after_a_pull_are_those_of_their_versions(
    seen: dict[str, Any], root: Path
) -> None:
    """The first token, too: a copy that is not ordered after the computation would read others."""
    check_logprobs_of_both_versions(root, seen["mixed"])


def test_sleep_wake_up_and_pull_equal_a_fresh_engine(seen: dict[str, Any]) -> None:
    check_same(seen["woken"], seen["fresh"])


def test_a_request_that_is_cut_goes_on_as_if_never_cut(seen: dict[str, Any]) -> None:
    for name, (whole, joined) in seen["cut"].items():
        assert len(joined.version_runs) == 1
        check_same({name: joined}, {name: whole})


def test_preempted_requests_are_those_that_had_room(seen: dict[str, Any]) -> None:
    assert seen["stats"].preemptions > 0
    check_same(seen["crowded"], seen["crowd"])


def test_without_logprobs_the_tokens_are_the_same(seen: dict[str, Any]) -> None:
    with_logprobs, without = (seen["without-logprobs"][name] for name in ("with", "without"))
    assert without.token_ids == with_logprobs.token_ids
    assert all(math.isnan(value) for value in without.logprobs)


def test_the_ratio_is_1_at_age_0_whatever_was_cut(seen: dict[str, Any], root: Path) -> None:
    done = seen["truncated"]
    assert [name for name, one in done.items() if not one.kept_tokens] == ["nothing"]
    batch = batch_of(list(done.values()), temperature=TEMPERATURE)
    with trainer(
        root / "tied-old", max_episode_tokens=96, max_tokens_per_microbatch=1000
    ) as policy_trainer:
        found = policy_trainer.logprobs(batch)[batch.loss_mask]
    np.testing.assert_allclose(found, batch.logprobs[batch.loss_mask], atol=TOLERANCE)


def test_rounding_differs_no_more_than_expected_at_age_0(seen: dict[str, Any], root: Path) -> None:
    batch = batch_of(list(seen["rounded"].values()), temperature=1.0)
    dtype = "bfloat16" if IS_CUDA else "float32"
    with trainer(
        root / "tied-old", dtype=dtype, max_episode_tokens=96, max_tokens_per_microbatch=1000
    ) as policy_trainer:
        found = policy_trainer.logprobs(batch)[batch.loss_mask]
    assert np.abs(found - batch.logprobs[batch.loss_mask]).mean() < MAX_MEAN_ROUNDING


@pytest.mark.skipif(IS_CUDA and torch.cuda.device_count() < 2, reason="needs two devices")
def test_two_tensor_parallel_ranks_answer_as_one_does(seen: dict[str, Any], root: Path) -> None:
    both = run("two", root, ranks=2)
    check_same(both["crowd"], seen["crowd"])
    check_logprobs_of_both_versions(root, both["mixed"])
