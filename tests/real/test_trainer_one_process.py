"""The trainer in one process: right logprobs, right weights in and out, safe steps."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.real.models import hf_tensors, tiny_model
from tests.real.trainer_helpers import ROW_LEN, hf_packed_logprobs, random_batch, trainer
from torchtitan_rl.backends.titan import model
from torchtitan_rl.backends.titan.model import FlexAttention, weighted_sum, weights_digest
from torchtitan_rl.errors import ConfigError, DeviceMemoryError, DivergedError
from torchtitan_rl.training.batch import trained_mask

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tiny_llama(path: Path, **rope: object) -> Path:
    """Llama with an odd number of heads, as SmolLM2-135M has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=72,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        initializer_range=0.15,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"} | rope,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("kind", ["tied", "untied", "qwen2", "mistral", "llama", "llama3"])
def test_logprobs_of_packed_documents_equal_transformers_on_each_alone(
    kind: str, tmp_path: Path
) -> None:
    """Trap 25, too: at the temperature, and over the tokens, that were sampled from."""
    path = tmp_path / kind
    if kind.startswith("llama"):
        tiny_llama(path, **(LLAMA3 if kind == "llama3" else {}))
    else:
        family = kind if kind in ("qwen2", "mistral") else "qwen3"
        tiny_model(path, tied=kind != "untied", family=family)
    vocab_size = 300 if kind.startswith("llama") else 288
    batch = random_batch(vocab_size=vocab_size, temperature=0.7, cuts_tokens=True)
    with trainer(path) as policy_trainer:
        found = policy_trainer.logprobs(batch)
    expected = hf_packed_logprobs(path, batch)
    assert np.abs(expected).max() > 1.0
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("share_prefixes", [True, False])
def test_the_model_that_is_built_on_cuda_equals_the_one_on_a_cpu(
    checkpoint: Path, share_prefixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlexAttention and torchtitan's layers, not compiled. On a CPU FlexAttention has no backward
    pass."""
    batch, configure = random_batch(), model.policy_config
    with trainer(checkpoint) as policy_trainer:
        expected = policy_trainer.logprobs(batch)

    def configure_for_cuda(
        architecture: Any, config: Any, layout: Any, dtype: str, lora: Any
    ) -> Any:
        on_cuda = dataclasses.replace(layout, device=torch.device("cuda"))
        made = configure(architecture, config, on_cuda, dtype, lora)
        assert isinstance(made.first_attention.inner_attention, FlexAttention.Config)
        return made

    monkeypatch.setattr(model, "policy_config", configure_for_cuda)
    with (
        torch.compiler.set_stance("force_eager"),
        trainer(checkpoint, share_prefixes=share_prefixes) as policy_trainer,
    ):
        np.testing.assert_allclose(policy_trainer.logprobs(batch), expected, atol=2e-5)


def test_supervised_training_lowers_the_negative_logprob_that_logprobs_reports(
    checkpoint: Path,
) -> None:
    batch = random_batch(temperature=1.0)
    with trainer(checkpoint) as policy_trainer:
        mean = -policy_trainer.logprobs(batch)[batch.loss_mask].mean()
        outputs = [policy_trainer.supervised_step(batch) for _ in range(4)]
    assert outputs[0].metrics["loss"] == pytest.approx(mean, abs=1e-5)
    assert outputs[3].metrics["loss"] < outputs[0].metrics["loss"]
    assert [output.version for output in outputs] == [1, 2, 3, 4]
    rates = [output.metrics["learning_rate"] for output in outputs]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 5e-4])


def test_a_policy_step_reports_how_far_trainer_and_generator_are_apart(checkpoint: Path) -> None:
    batch = random_batch()
    with trainer(checkpoint) as policy_trainer:
        difference = (policy_trainer.logprobs(batch) - batch.logprobs)[batch.loss_mask]
        metrics = policy_trainer.train_step(batch).metrics
    assert metrics["logprob_diff_mean"] == pytest.approx(np.abs(difference).mean(), rel=1e-5)
    assert metrics["logprob_diff_max"] == pytest.approx(np.abs(difference).max(), rel=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(np.exp(difference).mean(), rel=1e-4)
    assert metrics["trained_tokens"] == batch.loss_mask.sum()
    assert metrics["padding_share"] == 0.0
    assert metrics["computed_tokens"] == batch.num_tokens - batch.num_episodes
    assert metrics["shared_share"] == 0.0
    # At least 6 FLOPs a token and weight of the layers; a CPU has no peak to compare with.
    weights = sum(one.numel() for n, one in hf_tensors(checkpoint).items() if ".layers." in n)
    least = 6 * metrics["computed_tokens"] * weights
    assert least < metrics["flops_per_second_per_rank"] * metrics["step_s"] < 3 * least
    assert "mfu" not in metrics
    assert 0.0 < metrics["clip_share"] < 1.0
    assert 0.0 < metrics["entropy"] < np.log(288)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens_per_microbatch": ROW_LEN},
        {"max_tokens_per_microbatch": 100 * ROW_LEN},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
    ],
    ids=str,
)
def test_microbatches_and_recomputation_do_not_change_the_step(
    checkpoint: Path, fields: dict[str, object]
) -> None:
    batch = random_batch()
    with trainer(checkpoint) as policy_trainer:
        expected = policy_trainer.train_step(batch).metrics
        weights = policy_trainer.hf_state_dict()
    with trainer(checkpoint, **fields) as policy_trainer:
        found = policy_trainer.train_step(batch).metrics
        for name, tensor in policy_trainer.hf_state_dict().items():
            torch.testing.assert_close(tensor, weights[name], atol=2e-6, rtol=0)
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("family", "tied"), [("qwen3", True), ("qwen3", False), ("qwen2", True), ("mistral", False)]
)
def test_weights_are_handed_out_and_exported_as_transformers_saves_them(
    family: str, tied: bool, tmp_path: Path
) -> None:
    source = tiny_model(tmp_path / "source", tied=tied, family=family)
    batch = random_batch()
    with trainer(source) as policy_trainer:
        state = policy_trainer.hf_state_dict()
        original = hf_tensors(source)
        assert state.keys() == original.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in original.items())
        policy_trainer.train_step(batch)
        umask = os.umask(0o027)
        policy_trainer.export_hf(tmp_path / "exported")
        os.umask(umask)
        policy_trainer.export_hf(tmp_path / "bf16", dtype="bfloat16")
        trained = policy_trainer.logprobs(batch)
    found = hf_packed_logprobs(tmp_path / "exported", batch)
    assert np.abs(found - hf_packed_logprobs(source, batch)).max() > 1e-2
    np.testing.assert_allclose(found, trained, atol=1e-5)
    mode = (tmp_path / "exported" / "model.safetensors").stat().st_mode
    assert stat.filemode(mode) == "-rw-r-----"
    names = {entry.name for entry in (tmp_path / "exported").iterdir()}
    assert names == {entry.name for entry in source.iterdir()}
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    assert all(t.dtype == torch.bfloat16 for t in hf_tensors(tmp_path / "bf16").values())
    with trainer(tmp_path / "bf16") as policy_trainer:
        np.testing.assert_allclose(policy_trainer.logprobs(batch), trained, atol=0.2)


@pytest.mark.parametrize(("advantage", "value"), [(np.nan, "loss is nan"), (1e37, "grad_norm is")])
def test_a_step_that_diverges_raises_and_leaves_no_trace(
    checkpoint: Path, advantage: float, value: str
) -> None:
    """Trap 29: nothing non-finite ever reaches the weights, and a run ends by it."""
    good, bad = random_batch(), random_batch(seed=1)
    token = np.nonzero(bad.loss_mask)[0][0]
    bad.advantages[token] = advantage
    bad.logprobs[token] = 0.0  # a small ratio, which is not clipped
    with trainer(checkpoint) as policy_trainer:
        policy_trainer.train_step(good)
        policy_trainer.train_step(good)
        expected = {k: v.clone() for k, v in policy_trainer.hf_state_dict().items()}
    with trainer(checkpoint) as policy_trainer:
        policy_trainer.train_step(good)
        with pytest.raises(DivergedError, match=f"{value}.*version 1"):
            policy_trainer.train_step(bad)
        assert policy_trainer.version == 1
        policy_trainer.train_step(good)
        state = policy_trainer.hf_state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_step_that_runs_out_of_memory_names_the_options_to_lower_and_changes_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch()
    backward = torch.Tensor.backward

    def fail(loss: torch.Tensor) -> None:
        backward(loss)  # its gradients must not reach the next step
        raise torch.OutOfMemoryError("CUDA out of memory")

    with trainer(checkpoint) as policy_trainer:
        expected = policy_trainer.train_step(batch).metrics["grad_norm"]
    with trainer(checkpoint) as policy_trainer:
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "backward", fail)
            with pytest.raises(DeviceMemoryError, match=r"max-tokens-per-microbatch .*, .* full"):
                policy_trainer.train_step(batch)
        assert policy_trainer.version == 0
        assert policy_trainer.train_step(batch).metrics["grad_norm"] == expected


def bytes_in_memory(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().nbytes()


def test_a_step_after_an_offload_and_an_onload_is_the_same_bit_for_bit(checkpoint: Path) -> None:
    from torchtitan_rl.backends.titan.trainer import DeviceMemory

    batches = [random_batch(seed=seed) for seed in (1, 2, 3)]
    with trainer(checkpoint) as policy_trainer:
        for batch in batches:
            policy_trainer.train_step(batch)
        weights = policy_trainer.hf_state_dict()
    with trainer(checkpoint) as policy_trainer:
        memory = DeviceMemory(policy_trainer.state_tensors)
        for batch in batches:  # the first time there is no optimizer state yet
            kept = [tensor.clone() for tensor in policy_trainer.state_tensors()]
            for _ in range(2):
                memory.offload()
                assert sum(map(bytes_in_memory, policy_trainer.state_tensors())) == 0
                with pytest.raises(RuntimeError, match="offloaded"):
                    memory.require()
            for _ in range(2):
                memory.onload()
            pairs = zip(kept, policy_trainer.state_tensors(), strict=True)
            assert all(torch.equal(before, after) for before, after in pairs)
            policy_trainer.train_step(batch)
        moved = policy_trainer.hf_state_dict()
    assert all(torch.equal(moved[name], weight) for name, weight in weights.items())


def test_nonfinite_behaviour_logprobs_are_left_out_of_the_step_and_counted(
    checkpoint: Path,
) -> None:
    """Trap 15: the step is the one without those tokens."""
    broken, masked = random_batch(), random_batch()
    token = np.nonzero(broken.loss_mask)[0][0]
    broken.logprobs[token] = np.nan
    masked.loss_mask[token] = False
    with trainer(checkpoint) as policy_trainer:
        found = policy_trainer.train_step(broken).metrics
    with trainer(checkpoint) as policy_trainer:
        expected = policy_trainer.train_step(masked).metrics
    assert found["masked_nonfinite"] == 1
    assert expected["masked_nonfinite"] == 0
    assert (found["loss"], found["grad_norm"]) == (expected["loss"], expected["grad_norm"])


def test_a_batch_without_trained_tokens_or_with_longer_episodes_is_refused(
    checkpoint: Path,
) -> None:
    batch = random_batch()
    longest = f"an episode of {batch.episode_lengths.max()} tokens"
    with (
        trainer(checkpoint, max_episode_tokens=16) as policy_trainer,
        pytest.raises(ValueError, match=longest),
    ):
        policy_trainer.train_step(batch)
    batch.loss_mask[:] = False
    with trainer(checkpoint) as policy_trainer, pytest.raises(ValueError, match="no token"):
        policy_trainer.train_step(batch)


def test_an_architecture_that_is_not_supported_is_refused_by_name(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="'mamba' is not supported"), trainer(tmp_path):
        pass


def test_a_policy_that_cannot_be_loaded_leaves_no_process_group(
    checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copy(checkpoint / "config.json", tmp_path)
    with pytest.raises(Exception, match="safetensors"), trainer(tmp_path):
        pass
    assert not torch.distributed.is_initialized()


def test_a_step_tells_the_logprob_and_the_part_of_the_loss_of_each_token(checkpoint: Path) -> None:
    batch = random_batch(cuts_tokens=True)
    selected_N = trained_mask(batch)
    digests = []
    for _ in range(2):
        with trainer(checkpoint) as policy:
            expected_N = policy.logprobs(batch)
            output = policy.train_step(batch)
        tokens = output.tokens
        assert tokens is not None
        digests.append(output.metrics["weights_digest"])
        for values_N in (tokens.logprobs, tokens.losses, tokens.gradients):
            assert (np.isfinite(values_N) == selected_N).all()
        assert (tokens.logprobs == expected_N)[selected_N].all()
        assert np.nansum(tokens.losses) == pytest.approx(output.metrics["loss"], rel=1e-4)
        # On policy the loss is linear in the ratio: its derivative by the logprob is its value.
        ratios_N = np.exp(tokens.logprobs - batch.logprobs)
        is_kept_N = selected_N & (np.abs(ratios_N - 1) < 0.2)
        assert tokens.gradients[is_kept_N] == pytest.approx(tokens.losses[is_kept_N], rel=1e-4)
    assert digests[0] == digests[1]


def test_a_digest_sees_every_bit_of_the_weights_on_each_kind_of_device(checkpoint: Path) -> None:
    with trainer(checkpoint) as policy:
        first = weights_digest(policy.state_tensors())
        next(policy.state_tensors()).data.view(-1).view(torch.int32)[7] ^= 1
        assert weights_digest(policy.state_tensors()) != first
    values = torch.randn(1000)
    swapped = values[torch.randperm(1000)]
    assert weighted_sum(values) != weighted_sum(swapped)
    assert weighted_sum(values) == weighted_sum(values.clone())
