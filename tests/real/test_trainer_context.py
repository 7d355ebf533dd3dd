"""Context parallelism: ranks that split the tokens of each pass are one process, for rows of any
shape and every kind of step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.real.models import tiny_model
from tests.real.test_trainer_experts import with_random_experts
from tests.real.test_trainer_sharing import LOSSES, tree_batch
from tests.real.trainer_helpers import ROW_LEN, free_ports, random_batch, run_ranks, trainer
from tests.support.episodes import batch_of, make_episode
from torchtitan_rl.config.lora import LoraConfig
from torchtitan_rl.training.batch import PreferenceLoss, StepOutput, TrainingBatch

TEACHER_TOP = 3
OF_TOKENS = ("logprobs", "losses", "gradients")


def batches_of_odd_shapes() -> Iterator[TrainingBatch]:
    """What a cut of rows by position meets."""
    rng = np.random.default_rng(0)

    def row(length: int, trained: slice, prefix: tuple[int, ...] = ()) -> Any:
        tokens = [*prefix, *rng.integers(0, 288, length - len(prefix)).tolist()]
        mask = np.zeros(length, dtype=np.bool_)
        mask[trained] = True
        return make_episode(tokens, mask.tolist(), seed=length)

    yield batch_of([row(2, slice(1, 2))], row_len=ROW_LEN)  # one token to compute
    yield batch_of([row(2, slice(1, 2)), row(3, slice(1, 3))], row_len=ROW_LEN)  # three
    yield batch_of([row(40, slice(39, 40))], row_len=ROW_LEN)  # the first ranks read no logits
    early = replace(row(41, slice(1, 3)), advantages=(1.0,) * 41)
    yield batch_of([early, row(7, slice(3, 7))], row_len=ROW_LEN)
    prefix = tuple(rng.integers(0, 288, 30).tolist())  # longer than half of its tree
    siblings = [row(30 + size, slice(30, 30 + size), prefix) for size in (1, 2, 5, 9)]
    yield batch_of(siblings, row_len=ROW_LEN)
    yield tree_batch(5)  # with tokens from parts of the vocabulary


def with_teacher(batch: TrainingBatch) -> TrainingBatch:
    rng = np.random.default_rng(1)
    ids_NK = rng.random((batch.num_tokens, 288)).argsort(axis=1)[:, :TEACHER_TOP].astype(np.int32)
    logprobs_NK = np.log(rng.dirichlet([1.0] * (TEACHER_TOP + 1), batch.num_tokens))
    logprobs_NK[rng.random(batch.num_tokens) < 0.3] = np.nan
    return replace(
        batch,
        teacher_ids=ids_NK,
        teacher_logprobs=logprobs_NK[:, :TEACHER_TOP].astype(np.float32),
        teacher_coefficient=0.5,
    )


def take_steps(checkpoint: Path, *, port: int = 0, **fields: Any) -> dict[str, Any]:
    os.environ["MASTER_PORT"] = str(port)
    is_moe = checkpoint.name == "moe"
    pairs = random_batch(seed=3, num_episodes=8)
    margins = PreferenceLoss(beta=0.1, references=np.linspace(-60.0, -90.0, 8))
    with trainer(
        checkpoint,
        loss=LOSSES["reference"],
        sft_coefficient=0.3,
        updates_per_batch=2,
        max_steps=20,
        **fields,
    ) as policy_trainer:
        logprobs, steps = [], list[StepOutput]()
        for batch in batches_of_odd_shapes():
            batch = with_random_experts(batch) if is_moe else batch
            logprobs.append(policy_trainer.logprobs(batch))
            steps.append(policy_trainer.train_step(batch, examples=random_batch(seed=4)))
        steps.append(policy_trainer.train_step(with_teacher(random_batch(seed=5))))
        steps.append(policy_trainer.supervised_step(tree_batch(6)))
        steps.append(policy_trainer.preference_step(pairs, margins))
        weights = {name: one.clone() for name, one in policy_trainer.hf_state_dict().items()}
    return {"logprobs": logprobs, "steps": steps, "weights": weights}


def one_rank(
    rank: int, layouts: dict[str, dict[str, Any]], checkpoint: Path, ports: list[int]
) -> None:
    torch.set_num_threads(1)
    for (name, fields), port in zip(layouts.items(), ports, strict=True):
        result = take_steps(checkpoint, port=port, **fields)
        if rank == 0:
            torch.save(result, checkpoint.parent / f"{name}.pt")


def check_layouts(
    layouts: dict[str, dict[str, Any]], num_ranks: int, checkpoint: Path, **fields: Any
) -> None:
    """The layouts take the steps of one process; ``fields`` are common to all."""
    expected = take_steps(checkpoint, **fields)
    layouts = {name: fields | own for name, own in layouts.items()}
    run_ranks(one_rank, num_ranks, layouts, checkpoint, free_ports(len(layouts)))
    for name in layouts:
        found = torch.load(checkpoint.parent / f"{name}.pt", weights_only=False)
        for own, of_one in zip(found["logprobs"], expected["logprobs"], strict=True):
            np.testing.assert_allclose(own, of_one, atol=2e-4, err_msg=name)
        for own, of_one in zip(found["steps"], expected["steps"], strict=True):
            for metric in ("loss", "grad_norm", "entropy", "trained_tokens"):
                assert own.metrics[metric] == pytest.approx(
                    of_one.metrics[metric], rel=2e-5, abs=1e-6
                ), (name, metric)
            for column in OF_TOKENS:
                np.testing.assert_allclose(
                    getattr(own.tokens, column), getattr(of_one.tokens, column), atol=2e-4
                )
        assert found["weights"].keys() == expected["weights"].keys()
        for tensor, of_one in expected["weights"].items():
            torch.testing.assert_close(found["weights"][tensor], of_one, atol=2e-4, rtol=0)


def test_two_ranks_take_the_steps_of_one_process(tmp_path: Path) -> None:
    check_layouts({"cp": {"context_parallel": 2}}, 2, tiny_model(tmp_path / "policy"))


@pytest.mark.soak
def test_adapters_experts_recomputation_and_compiled_layers_are_split_alike(
    tmp_path: Path,
) -> None:
    two = {"context_parallel": 2}
    policy = tiny_model(tmp_path / "policy")
    check_layouts({"lora": two}, 2, policy, lora=LoraConfig(rank=4))
    layouts = {kind: two | {"activation_checkpointing": kind} for kind in ("selective", "full")}
    layouts["compiled"] = two | {"compile": True}
    check_layouts(layouts, 2, policy)
    moe = tiny_model(tmp_path / "moe", family="qwen3_moe", tied=False)
    check_layouts({"moe": two, "moe-ep": two | {"expert_parallel": 2}}, 2, moe)


@pytest.mark.soak
def test_four_ranks_take_the_steps_of_one_process(tmp_path: Path) -> None:
    layouts: dict[str, dict[str, Any]] = {
        "cp-4": {"context_parallel": 4},
        "fsdp-cp": {"data_parallel_shard": 2, "context_parallel": 2},
        "hsdp-cp": {"data_parallel_replicate": 2, "context_parallel": 2},
        "cp-tp": {"context_parallel": 2, "tensor_parallel": 2},
    }
    check_layouts(layouts, 4, tiny_model(tmp_path / "policy", num_kv_heads=4))
    layouts = {
        "fsdp-cp-ep": {"data_parallel_shard": 2, "context_parallel": 2, "expert_parallel": 4},
        "cp-tp-ep": {"context_parallel": 2, "tensor_parallel": 2, "expert_parallel": 4},
    }
    moe = tiny_model(tmp_path / "moe", family="qwen3_moe", tied=False, num_kv_heads=4)
    check_layouts(layouts, 4, moe)
