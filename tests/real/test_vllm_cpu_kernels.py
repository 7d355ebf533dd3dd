"""vLLM's CPU kernels in the layers of its engines, judged by float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import _custom_ops  # noqa: F401 (loads the kernels)
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor import custom_op
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.engine.llm_engine import LLMEngine

from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.cpu_kernels import (
    FlatRotaryEmbedding,
    KernelRMSNorm,
    KernelSiluAndMul,
    use_cpu_kernels,
)
from torchtitan_rl.backends.vllm.engine import VllmEngine

ROWS, EPSILON = 5, 1e-6


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """A configuration like that of engines on a CPU."""
    torch.manual_seed(0)
    config = VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))
    with set_current_vllm_config(config):
        yield


@pytest.fixture
def natively(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that computed as vLLM does, one entry for each call."""
    computed: list[str] = []
    for layer in (RMSNorm, SiluAndMul):
        native = layer.forward_native

        def note(self: Any, *args: Any, native: Callable[..., Any] = native) -> Any:
            computed.append(type(self).__name__)
            return native(*([self] if isinstance(self, RMSNorm) else []), *args)

        monkeypatch.setattr(layer, "forward_native", note)
    return computed


def rows(size: int, *, is_strided: bool) -> torch.Tensor:
    """Of random numbers; strided as one of three heads in a joint projection is."""
    if not is_strided:
        return torch.randn(ROWS, size)
    return torch.randn(ROWS, 3 * size)[:, size : 2 * size]


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight.double()


def assert_equal(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)


def test_an_engine_on_a_cpu_builds_layers_with_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(arguments: Any) -> None:
        raise RuntimeError("no engine")

    monkeypatch.setattr(custom_op, "op_registry_oot", {})
    monkeypatch.setattr(LLMEngine, "from_engine_args", refuse)
    with pytest.raises(RuntimeError, match="no engine"):
        VllmEngine(GeneratorSpec(model=tmp_path))
    assert type(RMSNorm(16)) is KernelRMSNorm
    assert type(SiluAndMul()) is KernelSiluAndMul
    assert type(rotation(RotaryEmbedding, is_neox=True)) is FlatRotaryEmbedding
    use_cpu_kernels()  # as the process's next engine does


@pytest.mark.parametrize("size", [16, 192, 20])
@pytest.mark.parametrize("is_strided", [False, True])
def test_rms_norm(size: int, is_strided: bool, natively: list[str]) -> None:
    layer = KernelRMSNorm(size, eps=EPSILON)
    layer.weight.data.normal_()
    x = rows(size, is_strided=is_strided)
    given = x.clone()
    assert_equal(layer(x), normed(x, layer.weight))
    assert torch.equal(x, given)
    assert len(natively) == (size == 20)


@pytest.mark.parametrize("size", [16, 192, 20])
@pytest.mark.parametrize("is_strided", [False, True])
def test_rms_norm_of_a_sum(size: int, is_strided: bool, natively: list[str]) -> None:
    layer = KernelRMSNorm(size, eps=EPSILON)
    layer.weight.data.normal_()
    x, residual = (rows(size, is_strided=is_strided) for _ in range(2))
    added = x.double() + residual.double()
    result, summed = layer(x, residual)
    assert_equal(result, normed(added, layer.weight))
    assert_equal(summed, added)
    assert len(natively) == (size == 20)


@pytest.mark.parametrize("other", [{"has_weight": False}, {"var_hidden_size": 16}])
def test_a_norm_that_the_kernel_does_not_know_is_vllms(other: dict[str, Any], natively: list[str]):
    KernelRMSNorm(32, **other)(torch.randn(ROWS, 32))
    assert natively == ["KernelRMSNorm"]


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_another_dtype_than_float32_is_vllms(
    weight_dtype: torch.dtype, natively: list[str]
) -> None:
    x = torch.randn(ROWS, 32).bfloat16()
    assert KernelRMSNorm(32, dtype=weight_dtype)(x).dtype == torch.bfloat16
    assert KernelSiluAndMul()(x).dtype == torch.bfloat16
    assert natively == ["KernelRMSNorm", "KernelSiluAndMul"]


@pytest.mark.parametrize("size", [16, 640, 20])
@pytest.mark.parametrize("is_strided", [False, True])
def test_silu_and_product(size: int, is_strided: bool, natively: list[str]) -> None:
    x = rows(2 * size, is_strided=is_strided)
    gate, up = x.double().chunk(2, dim=-1)
    assert_equal(KernelSiluAndMul()(x), torch.nn.functional.silu(gate) * up)
    assert len(natively) == (size == 20)


def rotation(layer: type[RotaryEmbedding], *, is_neox: bool) -> RotaryEmbedding:
    return layer(16, 16, 64, 1e4, is_neox, torch.float32)


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("key_heads", [1, 3])
@pytest.mark.parametrize("is_strided", [False, True])
def test_heads_are_rotated_by_the_positions_of_their_tokens(
    is_neox: bool, key_heads: int, is_strided: bool
) -> None:
    layer = rotation(FlatRotaryEmbedding, is_neox=is_neox)
    positions = torch.tensor([0, 7, 1, 40, 63])
    heads = [torch.randn(ROWS, number, 24) for number in (4, key_heads)]
    query, key = (x[..., 8:] if is_strided else x[..., 8:].contiguous() for x in heads)
    expected = layer.forward_native(positions, query.clone(), key.clone())
    for found, wanted in zip(layer.forward_cpu(positions, query, key), expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_vllms_kernel_still_takes_heads_for_tokens() -> None:
    """When this fails, `FlatRotaryEmbedding` can be removed."""
    layer, x = rotation(RotaryEmbedding, is_neox=False), torch.randn(ROWS, 4, 16)
    positions = torch.arange(ROWS)
    expected, _ = layer.forward_native(positions, x.clone(), x.clone())
    found, _ = layer.forward_cpu(positions, x.clone(), x.clone())
    assert (found - expected).abs().max() > 0.1
