"""Adapters in the trainer: only they learn, and they are what is published, saved and exported."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.real.models import hf_tensors, tiny_model
from tests.real.test_trainer_checkpoints import TIMINGS
from tests.real.test_trainer_parallel import METRICS, batches, written_together
from tests.real.trainer_helpers import free_ports, hf_packed_logprobs, run_ranks, trainer
from torchtitan_rl.backends.titan.hf import export_checkpoint
from torchtitan_rl.backends.titan.model import build_policy, without_adapters
from torchtitan_rl.config.lora import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    ADAPTER_WEIGHTS,
    TARGETS,
    LoraConfig,
    Target,
    adapter_shapes,
)
from torchtitan_rl.config.model import read_architecture
from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.training.config import LossConfig, OptimizerConfig

LORA = LoraConfig(rank=4, alpha=8.0)
FAST = OptimizerConfig(learning_rate=0.02)
KL = LossConfig(kl_coefficient=0.5)


@pytest.mark.parametrize(
    ("family", "tied", "targets"),
    [
        ("qwen3", True, TARGETS),
        ("qwen2", False, TARGETS),
        ("llama", True, ("k_proj", "v_proj", "down_proj")),
    ],
)
def test_the_merged_export_is_the_trained_policy_and_no_weight_of_the_base_moves(
    family: str, tied: bool, targets: tuple[Target, ...], tmp_path: Path
) -> None:
    """`transformers` computes the trainer's logprobs, so every adapter takes part in its passes."""
    checkpoint = tiny_model(tmp_path / "base", family=family, tied=tied)
    lora = LoraConfig(rank=4, alpha=8.0, target_modules=targets)
    batch = batches()[0]
    with trainer(checkpoint) as whole:
        of_base = whole.logprobs(batch)
    with trainer(checkpoint, lora=lora, optimizer=FAST) as policy_trainer:
        np.testing.assert_allclose(policy_trainer.logprobs(batch), of_base, atol=1e-4)
        before = {n: t.clone() for n, t in policy_trainer._model.state_dict().items()}
        digests = [policy_trainer.train_step(one).metrics["weights_digest"] for one in batches()]
        learned = policy_trainer.logprobs(batch)
        adapters = policy_trainer.hf_state_dict()
        policy_trainer.export_hf(tmp_path / "run" / "policy")
        for name, tensor in policy_trainer._model.state_dict().items():
            is_of_adapter = ".lora_" in name
            assert torch.equal(tensor, before[name]) is not is_of_adapter, name
        with without_adapters(policy_trainer._model):
            np.testing.assert_allclose(policy_trainer.logprobs(batch), of_base, atol=1e-4)
    assert len(set(digests)) == 2
    shapes = adapter_shapes(read_architecture(checkpoint), lora)
    assert {name: tuple(tensor.shape) for name, tensor in adapters.items()} == shapes
    assert np.abs(learned - of_base).max() > 0.1
    np.testing.assert_allclose(
        hf_packed_logprobs(tmp_path / "run" / "policy", batch), learned, atol=1e-4
    )
    merged, base = hf_tensors(tmp_path / "run" / "policy"), hf_tensors(checkpoint)
    assert merged.keys() == base.keys()
    changed = {name for name in base if not torch.equal(merged[name], base[name])}
    assert {name.split(".")[-2] for name in changed} == set(targets)


def test_the_base_is_kept_in_the_type_in_which_it_computes(checkpoint: Path) -> None:
    """In bfloat16 as on CUDA: 2 bytes a weight, which FSDP would round to in each pass."""
    with trainer(checkpoint, lora=LORA) as of_cpu:
        model = build_policy(
            of_cpu._architecture, of_cpu._config, of_cpu._layout, dtype="bfloat16", lora=LORA
        )
    assert {(one.dtype, one.requires_grad) for one in model.parameters()} == {
        (torch.bfloat16, False),
        (torch.float32, True),
    }


def test_the_exported_adapter_is_what_peft_and_vllm_read(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from vllm.lora.peft_helper import PEFTHelper

    with trainer(checkpoint, lora=LORA, optimizer=FAST) as policy_trainer:
        policy_trainer.train_step(batches()[0])
        policy_trainer.export_hf(tmp_path / "policy")
        adapters = policy_trainer.hf_state_dict()
    folder = tmp_path / ADAPTER_FOLDER
    assert {path.name for path in folder.iterdir()} == {ADAPTER_CONFIG, ADAPTER_WEIGHTS}
    helper = PEFTHelper.from_local_dir(str(folder), None)
    assert (helper.r, helper.vllm_lora_scaling_factor) == (4, 2.0)
    written = load_file(folder / ADAPTER_WEIGHTS)
    assert written.keys() == adapters.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in adapters.items())


def test_a_resumed_trainer_is_bit_for_bit_the_same_and_its_checkpoint_has_no_base(
    checkpoint: Path, tmp_path: Path
) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    path = tmp_path / "step-000001"
    first, second = batches()
    with trainer(checkpoint, lora=LORA, loss=KL) as policy_trainer:
        policy_trainer.train_step(first)
        policy_trainer.save_checkpoint(path)
        policy_trainer.finish_checkpoint()
        policy_trainer.export_hf(tmp_path / "run" / "policy", dtype="float32")
        expected = policy_trainer.train_step(second).metrics
    with trainer(checkpoint, lora=LORA, loss=KL) as policy_trainer:
        policy_trainer.train_step(second)  # whatever was before is gone
        policy_trainer.load_checkpoint(path)
        found = policy_trainer.train_step(second).metrics
    assert expected["kl_reference"] > 1e-6
    assert [found[n] for n in found if n not in TIMINGS] == [
        expected[n] for n in expected if n not in TIMINGS
    ]
    stored = FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = [name for name in stored if name.startswith("model.")]
    assert len(tensors) == len(adapter_shapes(read_architecture(checkpoint), LORA))
    assert all(".lora_" in name for name in tensors)
    export_checkpoint(path, tmp_path / "eval", source=checkpoint, dtype="float32")
    exported, wanted = hf_tensors(tmp_path / "eval"), hf_tensors(tmp_path / "run" / "policy")
    assert exported.keys() == wanted.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("other", [None, LoraConfig(rank=8), LoraConfig(rank=4, alpha=9.0)])
def test_a_checkpoint_of_other_adapters_is_refused(
    other: LoraConfig | None, checkpoint: Path, tmp_path: Path
) -> None:
    with trainer(checkpoint, lora=LORA) as policy_trainer:
        policy_trainer.save_checkpoint(tmp_path / "saved")
    with (
        trainer(checkpoint, lora=other) as policy_trainer,
        pytest.raises(CheckpointError, match="was written with LoraConfig"),
    ):
        policy_trainer.load_checkpoint(tmp_path / "saved")


def test_the_reference_of_the_penalty_is_the_base(checkpoint: Path) -> None:
    """The penalty of a policy with adapters is that against a second model of the base."""
    from torchtitan_rl.backends.titan.frozen import load_reference

    found = []
    for has_second_model in (False, True):
        with trainer(checkpoint, lora=LORA, loss=KL, optimizer=FAST) as policy_trainer:
            assert policy_trainer._reference is policy_trainer._model
            if has_second_model:
                with trainer(checkpoint) as whole:
                    policy_trainer._reference = load_reference(
                        checkpoint,
                        policy_trainer._config,
                        policy_trainer._layout,
                        policy=whole._model,
                        dtype="float32",
                    )
            found.append([policy_trainer.train_step(one).metrics for one in batches()])
    for one, other in zip(*found, strict=True):
        for name in (*METRICS, "kl_reference"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    assert found[0][1]["kl_reference"] > 1e-3


LAYOUTS = {"fsdp": {"data_parallel_shard": 2}, "tp": {"tensor_parallel": 2}}


def run_steps(checkpoint: Path, file: Path, port: int, **fields: int) -> None:
    os.environ["MASTER_PORT"] = str(port)
    with trainer(checkpoint, lora=LORA, loss=KL, **fields) as policy_trainer:
        start = {n: t.clone() for n, t in policy_trainer.hf_state_dict().items()}
        metrics = [policy_trainer.train_step(one).metrics for one in batches()]
        logprobs = policy_trainer.logprobs(batches()[1])
        weights = policy_trainer.hf_state_dict()
        parts = policy_trainer.hf_parts()
        assert parts is not None
        written = written_together(parts)
        policy_trainer.export_hf(file.with_suffix("") / "policy")
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save((start, metrics, logprobs, weights, written), file)


def one_rank(rank: int, checkpoint: Path, root: Path, ports: list[int]) -> None:
    torch.set_num_threads(1)
    for (name, fields), port in zip(LAYOUTS.items(), ports, strict=True):
        run_steps(checkpoint, root / f"{name}.pt", port, **fields)


def test_sharded_and_split_adapters_equal_one_process(checkpoint: Path, tmp_path: Path) -> None:
    run_steps(checkpoint, tmp_path / "one.pt", 0)
    run_ranks(one_rank, 2, checkpoint, tmp_path, free_ports(len(LAYOUTS)))
    start, metrics, logprobs, weights, _ = torch.load(tmp_path / "one.pt", weights_only=False)
    merged = hf_tensors(tmp_path / "one" / "policy")
    for name in LAYOUTS:
        found = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        assert found[0].keys() == start.keys()
        assert all(torch.equal(found[0][one], start[one]) for one in start), name
        for one, other in zip(found[1], metrics, strict=True):
            for metric in (*METRICS, "kl_reference"):
                assert one[metric] == pytest.approx(other[metric], rel=2e-5, abs=1e-6), metric
        np.testing.assert_allclose(found[2], logprobs, atol=1e-4)
        for tensor, expected in weights.items():
            torch.testing.assert_close(found[3][tensor], expected, atol=5e-5, rtol=0)
            assert torch.equal(found[4][tensor], found[3][tensor]), tensor
        for tensor, of_policy in hf_tensors(tmp_path / name / "policy").items():
            torch.testing.assert_close(of_policy, merged[tensor], atol=5e-5, rtol=0)
