"""The options of adapters: what is refused, and what adapters weigh."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.ready_configs import ready
from torchtitan_rl.config.lora import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    TARGETS,
    LoraConfig,
    Target,
    adapter_shapes,
    engine_rank,
    num_adapter_weights,
    read_adapters,
    write_adapter,
)
from torchtitan_rl.config.memory import PUBLISHED, memory_plan, num_weights
from torchtitan_rl.config.model import Experts, architecture_of
from torchtitan_rl.config.prepare import prepare_run
from torchtitan_rl.config.published import published_facts
from torchtitan_rl.config.resume import resume_errors, run_identity
from torchtitan_rl.configs.alphabet_sort_qwen3_0_6b import config as QWEN3
from torchtitan_rl.errors import ConfigError

SMOLLM2 = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    ("lora", "error"),
    [
        (LoraConfig(rank=513), "policy.lora.rank is 513"),
        (LoraConfig(rank=-1), "policy.lora.rank is -1"),
        (LoraConfig(rank=8, alpha=0.0), "policy.lora.alpha is 0.0"),
        (LoraConfig(rank=8, target_modules=()), "policy.lora.target_modules is empty: give some"),
        (
            LoraConfig(rank=8, target_modules=("lm_head",)),  # type: ignore[arg-type]
            "policy.lora.target_modules is ('lm_head',): it must be 'q_proj'",
        ),
        (LoraConfig(rank=8, target_modules=("q_proj", "q_proj")), "give each layer once"),
        (LoraConfig(rank=8, target_modules=("q_proj", "k_proj")), "give both or neither"),
    ],
)
def test_an_adapter_that_cannot_be_trained_or_served_is_refused(
    lora: LoraConfig, error: str, tmp_path: Path
) -> None:
    config, machine = ready("alphabet_sort_tiny", tmp_path)
    with pytest.raises(ConfigError) as refused:
        prepare_run(replace(config, policy=replace(config.policy, lora=lora)), machine)
    (found,) = refused.value.errors
    assert error in found


def test_a_plan_names_the_adapters(tmp_path: Path) -> None:
    config, machine = ready("alphabet_sort_tiny", tmp_path)
    lora = LoraConfig(rank=8, target_modules=("q_proj", "o_proj"))
    prepared = prepare_run(replace(config, policy=replace(config.policy, lora=lora)), machine)
    assert "training: adapters of rank 8 on q_proj o_proj; at most" in prepared.describe()
    assert "adapters: at most 3 versions published at a time" in prepared.describe()


@pytest.mark.parametrize("other", [LoraConfig(), LoraConfig(rank=4), LoraConfig(rank=8, alpha=8.0)])
def test_a_run_is_resumed_with_its_own_adapters_only(other: LoraConfig, tmp_path: Path) -> None:
    config, _ = ready("alphabet_sort_tiny", tmp_path)
    directory = Path(config.policy.checkpoint)
    one, changed = (
        run_identity(replace(config, policy=replace(config.policy, lora=lora)), directory)
        for lora in (LoraConfig(rank=8), other)
    )
    assert resume_errors(one, one) == []
    assert any(error.startswith("policy.lora.") for error in resume_errors(one, changed))


def test_an_adapter_of_rank_8_is_less_than_4_percent_of_smollm2() -> None:
    architecture = architecture_of(SMOLLM2)
    weights = num_adapter_weights(architecture, LoraConfig(rank=8))
    assert 0.015 < weights / num_weights(architecture) < 0.04


def test_sizes_of_adapters() -> None:
    """By hand, of 9 heads and 3 key/value heads of 64."""
    lora = LoraConfig(rank=8)
    shapes = adapter_shapes(architecture_of(SMOLLM2), lora)
    assert len(shapes) == 2 * 30 * len(TARGETS)
    layer = "base_model.model.model.layers.29."
    assert shapes[f"{layer}self_attn.v_proj.lora_A.weight"] == (8, 576)
    assert shapes[f"{layer}self_attn.v_proj.lora_B.weight"] == (192, 8)
    assert shapes[f"{layer}mlp.down_proj.lora_A.weight"] == (8, 1536)
    assert shapes[f"{layer}mlp.down_proj.lora_B.weight"] == (576, 8)
    per_layer = 2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536)
    assert num_adapter_weights(architecture_of(SMOLLM2), lora) == 8 * 30 * per_layer
    some: tuple[Target, ...] = ("q_proj",)
    assert len(adapter_shapes(architecture_of(SMOLLM2), replace(lora, target_modules=some))) == 60


def test_an_engine_holds_every_rank_that_is_trained() -> None:
    assert [engine_rank(rank) for rank in (1, 2, 8, 9, 257, 512)] == [1, 8, 8, 16, 320, 512]


def test_adapters_take_the_memory_of_moments_and_of_a_reference_away() -> None:
    policy = published_facts("Qwen/Qwen3-8B")
    assert policy is not None
    penalized = replace(
        QWEN3,
        trainer=replace(QWEN3.trainer, loss=replace(QWEN3.trainer.loss, kl_coefficient=0.1)),
    )
    lora = replace(penalized, policy=replace(penalized.policy, lora=LoraConfig(rank=16)))
    whole = memory_plan(penalized, policy, device="cuda", device_bytes=80 * 10**9)
    small = memory_plan(lora, policy, device="cuda", device_bytes=80 * 10**9)
    assert small.trainer["weights"] == whole.trainer["weights"] // 2  # not in float32
    assert small.trainer["optimizer"] < 0.02 * whole.trainer["optimizer"]
    assert "reference policy" in whole.trainer
    assert "reference policy" not in small.trainer
    assert small.host[PUBLISHED] < 0.02 * whole.host[PUBLISHED]
    assert small.replica["KV cache"] < whole.replica["KV cache"]
    assert small.replica["adapters"] > 0


SMALL = architecture_of(SMOLLM2 | {"num_hidden_layers": 2})


def written(folder: Path, lora: LoraConfig) -> Path:
    folder.mkdir()
    tensors = {name: torch.ones(shape) for name, shape in adapter_shapes(SMALL, lora).items()}
    write_adapter(folder, lora, tensors, base="base")
    return folder


def test_a_written_adapter_is_read(tmp_path: Path) -> None:
    one = written(tmp_path / "one", LoraConfig(rank=4))
    two = written(tmp_path / "two", LoraConfig(rank=9, target_modules=("q_proj", "o_proj")))
    found, errors = read_adapters([f"a={one}", f"b/c={two}"], SMALL, model_name="policy")
    assert errors == []
    assert [(each.name, each.path, each.rank) for each in found] == [
        ("a", one, 4),
        ("b/c", two, 9),
    ]
    assert found[0].targets == tuple(sorted(TARGETS))
    assert found[1].targets == ("o_proj", "q_proj")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("DIR", "give NAME=DIR"),
        ("=DIR", "give NAME=DIR"),
        ("a=", "give NAME=DIR"),
        ("a b=DIR", "a name has letters"),
        ("policy=DIR", "endpoint.model_name has that name"),
        ("a=nowhere", "has no adapter_config.json"),
    ],
)
def test_adapters_that_are_not_named_well_are_refused(
    text: str, error: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "one", LoraConfig(rank=4))
    text = text.replace("DIR", str(folder))
    found, (message,) = read_adapters([text], SMALL, model_name="policy")
    assert found == ()
    assert message.startswith(f"adapters has {text!r}: ")
    assert error in message
    _, (message,) = read_adapters([f"a={folder}", f"a={folder}"], SMALL, model_name="policy")
    assert "given twice" in message


def test_a_model_with_experts_is_served_without_adapters(tmp_path: Path) -> None:
    folder = written(tmp_path / "one", LoraConfig(rank=4, target_modules=("q_proj",)))
    mixture = replace(SMALL, experts=Experts(number=8, per_token=2, has_normalized_weights=True))
    found, (message,) = read_adapters([f"a={folder}"], mixture, model_name="policy")
    assert found == ()
    assert "a model with experts" in message


def config_with(**fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / ADAPTER_CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def tensors_with(name: str, *shape: int, value: float = 1.0) -> Callable[[Path], None]:
    """A changed tensor; without a shape it is missing."""

    def change(folder: Path) -> None:
        path = folder / ADAPTER_WEIGHTS
        tensors = load_file(path)
        tensors.pop(name, None)
        save_file(tensors | ({name: torch.full(shape, value)} if shape else {}), path)

    return change


FIRST = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (config_with(peft_type="IA3"), "is not of LoRA"),
        (config_with(bias="all"), "is not of LoRA without biases"),
        (config_with(use_dora=True), "has use_dora, which is not served"),
        (config_with(modules_to_save=["lm_head"]), "has modules_to_save"),
        (config_with(r=1024), "its rank is 1024; vLLM serves ranks of 1 to 512"),
        (config_with(r="8"), "its rank is 8"),
        (config_with(r=0), "its rank is 0"),
        (config_with(r=8), "its rank is 8, and its matrices have rank 4"),
        (config_with(lora_alpha=None), "has lora_alpha None; it must be above 0"),
        (config_with(lora_alpha="16"), "has lora_alpha '16'"),
        (config_with(lora_alpha=float("nan")), "has lora_alpha nan"),
        (config_with(lora_alpha=1e300), "has lora_alpha 1e+300"),
        (config_with(rank_pattern="q_proj"), "has rank_pattern 'q_proj'; give numbers above 0"),
        (config_with(alpha_pattern={"q_proj": math.nan}), "has alpha_pattern {'q_proj': nan}"),
        (config_with(init_lora_weights="pissa_niter_4"), "with which PEFT changes the model"),
        (config_with(use_bdlora={"a": 1}), "has use_bdlora"),
        (lambda folder: (folder / ADAPTER_CONFIG).write_text("["), "adapter_config.json"),
        (lambda folder: (folder / ADAPTER_WEIGHTS).unlink(), "has no adapter_model.safetensors"),
        (lambda folder: (folder / ADAPTER_WEIGHTS).write_bytes(b"\x10"), "is damaged"),
        (tensors_with(f"{FIRST}.lora_A.weight"), "has no second matrix"),
        (tensors_with(f"{FIRST}.lora_A.weight", 4, 575), "does not fit the model"),
        (tensors_with(f"{FIRST}.lora_B.weight", 575, 4), "does not fit the model"),
        (tensors_with(f"{FIRST}.lora_B.weight", 576, 5), "has no second matrix that fits"),
        (tensors_with(f"{FIRST}.lora_B.weight", 576), "has no second matrix that fits"),
        (tensors_with(f"{FIRST}.lora_B.weight", 576, 4, value=math.nan), "are no floats up to"),
        (tensors_with(f"{FIRST}.lora_B.weight", 576, 4, value=1e30), "are no floats up to"),
        (tensors_with("lm_head.weight", 4, 4), "no matrix of an adapter"),
        (tensors_with(FIRST.replace("0", "2") + ".lora_A.weight", 4, 576), "does not fit"),
    ],
)
def test_an_adapter_of_another_kind_or_model_is_refused(
    change: Callable[[Path], object], error: str, tmp_path: Path
) -> None:
    folder = written(tmp_path / "one", LoraConfig(rank=4))
    change(folder)
    found, (message,) = read_adapters([f"a={folder}"], SMALL, model_name="policy")
    assert found == ()
    assert error in message
