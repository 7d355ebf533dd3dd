"""Policies with experts (Qwen3-MoE, DeepSeek-V3) in the trainer: equal to transformers, in every
layout."""

from __future__ import annotations

import faulthandler
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.real.models import hf_tensors, tiny_model
from tests.real.test_trainer_parallel import METRICS, written_together
from tests.real.trainer_helpers import (
    TIMEOUT_S,
    free_ports,
    hf_packed_logprobs,
    random_batch,
    run_ranks,
    trainer,
)
from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.config import LossConfig
from torchtitan_rl.types import UNKNOWN_EXPERT

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"data_parallel_shard": 2},
    "ep": {"data_parallel_shard": 2, "expert_parallel": 2},
    "tp-ep": {"tensor_parallel": 2, "expert_parallel": 2},
    "hsdp": {"data_parallel_replicate": 2},
}
OF_ROUTING = (
    *("expert_load_max", "expert_load/layer_1"),
    *("expert_entropy_mean", "expert_entropy/layer_1"),
)
MOONLIGHT = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": None}
FAMILIES = ["qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.soak)]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    path = tmp_path_factory.mktemp("moe") / "policy"
    if request.param == "moonlight":
        return tiny_model(path, family="deepseek_v3", tied=False, changes=MOONLIGHT)
    return tiny_model(path, family=request.param, tied=False)


@pytest.mark.parametrize("checkpoint", ["qwen3_moe", "deepseek_v3", "moonlight"], indirect=True)
def test_logprobs_and_gradients_equal_transformers(checkpoint: Path) -> None:
    from transformers import AutoModelForCausalLM

    from torchtitan_rl.backends.titan.hf import PolicyStateDictAdapter, expert_names

    batch = random_batch(cuts_tokens=True)
    with trainer(checkpoint) as policy_trainer:
        found = policy_trainer.logprobs(batch)
    np.testing.assert_allclose(found, hf_packed_logprobs(checkpoint, batch), atol=1e-5)

    # Without the padding token, which gets no gradient in transformers.
    token_ids = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 40))
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    logits_LV = reference(token_ids[None]).logits[0]
    torch.nn.functional.cross_entropy(logits_LV[:-1], token_ids[1:]).backward()
    with trainer(checkpoint) as policy_trainer:
        model, length = policy_trainer._model, len(token_ids)
        positions_1T, ends_T = torch.arange(length)[None], torch.full((length,), length)
        masks = model.get_attention_masks(positions_1T, ends_T)
        logits_1SV = model(token_ids[None], positions_1T, masks, torch.arange(length - 1))
        torch.nn.functional.cross_entropy(logits_1SV[0], token_ids[1:]).backward()
        grads = {name: value.grad.full_tensor() for name, value in model.named_parameters()}
        named = PolicyStateDictAdapter(model.config).to_hf(grads)
    of_reference = {name: one.grad for name, one in reference.named_parameters()}
    compared = 0
    for name, found_grad in named.items():
        names = expert_names(name, len(found_grad))
        if names is None:
            expected = of_reference[name]
        else:  # transformers joins the two first projections of all experts
            layer, projection = names[0].split(".")[2], names[0].split(".")[6]
            prefix = f"model.layers.{layer}.mlp.experts"
            if projection == "down_proj":
                expected = of_reference[f"{prefix}.down_proj"]
            else:
                halves = of_reference[f"{prefix}.gate_up_proj"].chunk(2, dim=1)
                expected = halves[projection == "up_proj"]
        difference = (found_grad - expected).norm() / expected.norm()
        assert difference < 1e-5, name
        compared += 1
    assert compared == len(grads)


def test_replayed_experts_are_used_and_the_gate_still_gets_gradients(checkpoint: Path) -> None:
    with trainer(checkpoint) as policy_trainer:
        model, length = policy_trainer._model, 12
        token_ids_1T = torch.arange(length)[None]
        positions_1T, ends_T = torch.arange(length)[None], torch.full((length,), length)
        arguments = (
            *(token_ids_1T, positions_1T),
            *(model.get_attention_masks(positions_1T, ends_T), torch.arange(length)),
        )
        chosen: list[torch.Tensor] = []
        for router in model.routers():
            router.register_forward_hook(lambda _, __, output: chosen.append(output[1]))
        own = model(*arguments)
        of_own_1TXK = torch.stack(chosen, dim=2)
        of_own_1TXK = of_own_1TXK.to(torch.uint8)
        same, unknown = (
            model(*arguments, one)
            for one in (of_own_1TXK, torch.full_like(of_own_1TXK, UNKNOWN_EXPERT))
        )
        torch.testing.assert_close(same, own)
        torch.testing.assert_close(unknown, own, atol=0, rtol=0)
        counts = [(int(one.num_mismatched), int(one.num_replayed)) for one in model.routers()]
        assert counts == [(0, length)] * 2
        other = model(*arguments, (of_own_1TXK + 1) % 8)
        counts = [(int(one.num_mismatched), int(one.num_replayed)) for one in model.routers()]
        assert counts[0] == (length, 2 * length)
        assert (other - own).abs().max() > 1e-2
        other.square().mean().backward()
        for router in model.routers():
            assert router.gate.weight.grad.norm() > 1e-4


def with_random_experts(batch: TrainingBatch) -> TrainingBatch:
    """Two of eight experts for each token in both layers; those of some tokens are not known."""
    rng = np.random.default_rng(batch.num_tokens)
    experts_NXK = rng.random((batch.num_tokens, 2, 8)).argsort(axis=-1)[..., :2].astype(np.uint8)
    experts_NXK[rng.random(batch.num_tokens) < 0.2] = UNKNOWN_EXPERT
    return replace(batch, routed_experts=experts_NXK)


def test_a_step_with_replayed_experts(checkpoint: Path) -> None:
    batch = random_batch()
    own_NXK = np.full((batch.num_tokens, 2, 2), UNKNOWN_EXPERT, dtype=np.uint8)
    loss = LossConfig(kl_coefficient=0.1, proximal_policy="recomputed", importance_weight="token")
    with trainer(checkpoint, loss=loss) as policy_trainer:
        model = policy_trainer._model
        chosen: list[torch.Tensor] = []
        hooks = [
            router.register_forward_hook(lambda _, __, output: chosen.append(output[1][0]))
            for router in model.routers()
        ]
        for start, length in zip(batch.episode_starts, batch.episode_lengths, strict=True):
            chosen.clear()
            tokens_1T = torch.from_numpy(batch.token_ids[start : start + length])[None]
            positions_1T, ends_T = torch.arange(length)[None], torch.full((length,), length)
            masks = model.get_attention_masks(positions_1T, ends_T)
            model(tokens_1T, positions_1T, masks, torch.arange(1))
            own_NXK[start : start + length] = torch.stack(chosen, dim=1).numpy()
        for hook in hooks:
            hook.remove()
        own = policy_trainer.train_step(batch)
    other = with_random_experts(batch)
    steps = []
    for one, checkpointing in (
        (replace(batch, routed_experts=own_NXK), "none"),
        (other, "none"),
        (other, "full"),
    ):
        with trainer(
            checkpoint, loss=loss, activation_checkpointing=checkpointing
        ) as policy_trainer:
            before_N = policy_trainer.logprobs(one)
            step = policy_trainer.train_step(one)
            trained_N = one.loss_mask
            np.testing.assert_allclose(
                step.tokens.logprobs[trained_N], before_N[trained_N], atol=1e-6
            )
            steps.append(step.metrics)
    same, random, recomputed = steps
    assert "routing_mismatch" not in own.metrics
    for name in ("loss", "grad_norm"):
        assert same[name] == pytest.approx(own.metrics[name], rel=1e-6)
        assert abs(random[name] - same[name]) > 1e-4 * abs(same[name]), name
        assert recomputed[name] == pytest.approx(random[name], rel=1e-6)
    assert same["routing_mismatch"] == 0.0
    assert 0.8 < random["routing_mismatch"] < 1.0
    assert recomputed["routing_mismatch"] == pytest.approx(random["routing_mismatch"])
    # The reference is computed with the same experts, so it is the policy.
    assert random["kl_reference"] == pytest.approx(0.0, abs=1e-9)
    wrong = replace(batch, routed_experts=own_NXK[:, :1])
    too_large = replace(batch, routed_experts=np.where(own_NXK == 7, 8, own_NXK).astype(np.uint8))
    with trainer(checkpoint) as policy_trainer:
        for bad, message in ((wrong, r"routed experts \(1, 2\)"), (too_large, "up to number 8")):
            with pytest.raises(ValueError, match=message):
                policy_trainer.train_step(bad)


def test_weights_in_and_out_are_those_of_the_files_and_a_missing_name_is_an_error(
    checkpoint: Path, tmp_path: Path
) -> None:
    original, batch = hf_tensors(checkpoint), random_batch()
    with trainer(checkpoint) as policy_trainer:
        state, parts = policy_trainer.hf_state_dict(), policy_trainer.hf_parts()
        assert parts is not None
        assert state.keys() == parts.keys() == original.keys()
        for name, tensor in original.items():
            assert torch.equal(state[name], tensor), name
            assert torch.equal(parts[name].elements(), tensor), name
        policy_trainer.train_step(batch)
        policy_trainer.export_hf(tmp_path / "exported")
        trained = policy_trainer.logprobs(batch)
        policy_trainer._names |= {"model.layers.0.mlp.experts.8.up_proj.weight"}
        for publish in (policy_trainer.hf_parts, policy_trainer.hf_state_dict):
            with pytest.raises(WeightSyncError, match=r"lacks .*experts\.8\.up_proj"):
                publish()
    found = hf_packed_logprobs(tmp_path / "exported", batch)
    np.testing.assert_allclose(found, trained, atol=1e-5)


def run_layout(checkpoint: Path, folder: Path, port: int, **fields: Any) -> None:
    os.environ["MASTER_PORT"] = str(port)
    batches = [random_batch(seed=1), with_random_experts(random_batch(seed=2))]
    with trainer(checkpoint, **fields) as policy_trainer:
        metrics = [policy_trainer.train_step(batch).metrics for batch in batches]
        logprobs = policy_trainer.logprobs(batches[1])
        weights, parts = policy_trainer.hf_state_dict(), policy_trainer.hf_parts()
        written = None if parts is None else written_together(parts)
        policy_trainer.save_checkpoint(folder / "checkpoint", {})
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save({"weights": weights, "written": written}, folder / "weights.pt")
        np.save(folder / "logprobs.npy", logprobs)
        (folder / "metrics.json").write_text(json.dumps(metrics))


def one_rank(
    rank: int, layouts: dict[str, dict[str, Any]], checkpoint: Path, root: Path, ports: list[int]
) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(TIMEOUT_S - 10.0, exit=True)
    for (name, fields), port in zip(layouts.items(), ports, strict=True):
        run_layout(checkpoint, root / name, port, **fields)
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def results(checkpoint: Path) -> Path:
    """One process, then the same steps in every layout of two ranks; a folder of results each."""
    (checkpoint.parent / "one").mkdir()
    run_layout(checkpoint, checkpoint.parent / "one", 0)
    run_layouts(LAYOUTS, 2, checkpoint.parent)
    return checkpoint.parent


def run_layouts(layouts: dict[str, dict[str, Any]], num_ranks: int, root: Path) -> None:
    for name in layouts:
        (root / name).mkdir()
    ports = free_ports(len(layouts))
    run_ranks(one_rank, num_ranks, layouts, root / "policy", root, ports)


def check_layout(results: Path, layout: str) -> None:
    expected_metrics = json.loads((results / "one" / "metrics.json").read_text())
    found_metrics = json.loads((results / layout / "metrics.json").read_text())
    for found, expected in zip(found_metrics, expected_metrics, strict=True):
        for name in METRICS:
            assert found[name] == pytest.approx(expected[name], rel=2e-5, abs=1e-6), name
        tolerance = 0.02 if "tp" in layout else 2e-5  # which pads the tokens
        for name in OF_ROUTING:
            assert found[name] == pytest.approx(expected[name], rel=tolerance), name
        assert found.get("routing_mismatch") == pytest.approx(expected.get("routing_mismatch"))
    expected_logprobs = np.load(results / "one" / "logprobs.npy")
    np.testing.assert_allclose(
        np.load(results / layout / "logprobs.npy"), expected_logprobs, atol=1e-4
    )
    expected = torch.load(results / "one" / "weights.pt")["weights"]
    found = torch.load(results / layout / "weights.pt")
    assert found["weights"].keys() == found["written"].keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found["weights"][name], tensor, atol=1e-4, rtol=0)
        assert torch.equal(found["written"][name], found["weights"][name]), name
    with trainer(results / "policy") as policy_trainer:
        policy_trainer.load_checkpoint(results / layout / "checkpoint")
        resumed = policy_trainer.logprobs(with_random_experts(random_batch(seed=2)))
    np.testing.assert_allclose(resumed, expected_logprobs, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_weights_and_checkpoints_of_two_ranks_are_those_of_one_process(
    layout: str, results: Path
) -> None:
    check_layout(results, layout)


@pytest.mark.soak
def test_layouts_of_four_ranks_equal_one_process(results: Path) -> None:
    layouts = {
        "hsdp-2x2": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
        "fsdp-4-ep-2": {"data_parallel_shard": 4, "expert_parallel": 2},
        "hsdp-ep-2": {
            "data_parallel_replicate": 2,
            "data_parallel_shard": 2,
            "expert_parallel": 2,
        },
        "fsdp-tp-ep-4": {"data_parallel_shard": 2, "tensor_parallel": 2, "expert_parallel": 4},
    }
    run_layouts(layouts, 4, results)
    for layout in layouts:
        check_layout(results, layout)


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_recomputation_does_not_change_the_step(checkpoint: Path, checkpointing: str) -> None:
    batch = random_batch()
    with trainer(checkpoint) as policy_trainer:
        expected = policy_trainer.train_step(batch).metrics
    with trainer(checkpoint, activation_checkpointing=checkpointing) as other:
        found = other.train_step(batch).metrics
    for name in ("loss", "grad_norm", "expert_load_max"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5), name
