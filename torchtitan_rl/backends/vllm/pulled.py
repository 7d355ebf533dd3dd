"""Whether an engine computes with the weights that it has pulled.

After a pull, layers are probed: the output of a linear layer for a unit vector is a column of the
weights that it really computes with, and an expert's output follows from its three matrices. Both
are compared with the published tensors. Comparing parameters would not be enough: on a CPU, and
with some kernels for experts on CUDA, vLLM computes from copies in another layout, and its loaders
may write into the copy as if it had the checkpoint's layout, or leave it with old weights.

The first pull of an engine probes every layer, each later pull one layer, in turn; embeddings, head
and final norm are probed at each pull. Layers that compute in a quantized type are left out.
Measured on a CPU with 4 layers: 4 to 28 ms at the first pull, 2 to 8 ms at later ones. Not run on
CUDA.

Shapes: N probes, D inputs, O outputs of a layer, F hidden dimension of an expert, K experts of a
token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from torchtitan_rl.errors import WeightSyncError

Tensors = Mapping[str, torch.Tensor]
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_PROBES = 2
_VISION_TOWER = "visual."  # in names of tensors
_STRIDE = 7919  # between the units that successive pulls probe


def filled_by(model: Any, tensors: Tensors) -> set[str]:
    """Return the names of the model's parameters that a version with ``tensors`` has to fill."""
    names = {name for name, _ in model.named_parameters()}
    return names if _has_tower(tensors) else {n for n in names if not n.startswith(_VISION_TOWER)}


def _has_tower(tensors: Tensors) -> bool:
    """Whether a version has the tensors of a vision tower, which is therefore trained."""
    return any(name.startswith(_VISION_TOWER) for name in tensors)


class PulledWeights:
    """Probes the layers of one rank's ``model`` (vLLM's)."""

    def __init__(self, model: Any) -> None:
        self._probes: list[tuple[int | None, str, _Probe]] = []
        packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
        for in_model, module in model.named_modules():
            path = in_model.removeprefix("language_model.")  # of models with a vision tower
            if (probe := _probe_of(module, path, packed)) is not None:
                layer = _LAYER.search(path)
                self._probes.append((int(layer[1]) if layer else None, path, probe))
        self._num_layers = 1 + max((layer or 0 for layer, _, _ in self._probes), default=0)
        self._num_pulls = 0

    def check(self, tensors: Tensors, version: int) -> None:
        """Check that the engine computes with ``tensors``, which it has just pulled. Raises
        WeightSyncError: a probed layer does not."""
        if wrong := self._find_errors(tensors):
            raise WeightSyncError(
                f"version {version}: the engine does not compute with the published weights of "
                f"{', '.join(wrong[:3])} ({len(wrong)} layers)"
            )

    @torch.inference_mode()
    def _find_errors(self, tensors: Tensors) -> list[str]:
        number, self._num_pulls = self._num_pulls, self._num_pulls + 1
        chosen = (None, number % self._num_layers)
        is_frozen = not _has_tower(tensors)
        return [
            path
            for layer, path, probe in self._probes
            if (number == 0 or layer in chosen)
            and not (is_frozen and path.startswith(_VISION_TOWER))
            and not probe(tensors, number)
        ]


_Probe = Callable[[Tensors, int], bool]  # whether the layer is right; the number of the pull


def _probe_of(module: Any, path: str, packed: Mapping[str, Sequence[str]]) -> _Probe | None:
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    method = getattr(module, "quant_method", None)
    if isinstance(module, RMSNorm) and module.has_weight:
        return partial(_norm, module, path)
    if isinstance(module, LinearBase) and isinstance(method, UnquantizedLinearMethod):
        parent, _, name = path.rpartition(".")
        return partial(_linear, module, [f"{parent}.{one}" for one in packed.get(name, [name])])
    if isinstance(module, RoutedExperts) and isinstance(method, UnquantizedFusedMoEMethod):
        return partial(_experts, module, path.rpartition(".")[0])
    if isinstance(module, MLAAttention) and hasattr(module, "W_UV"):
        return partial(_latent, module, path.partition(".mla_attn")[0])
    if isinstance(module, VocabParallelEmbedding) and isinstance(
        method, UnquantizedEmbeddingMethod
    ):
        probe = _head if isinstance(module, ParallelLMHead) else _embedding
        return partial(probe, module, path)
    return None


def _norm(module: Any, path: str, tensors: Tensors, number: int) -> bool:
    return _equal(module.weight, tensors[f"{path}.weight"])


def _linear(module: Any, paths: Sequence[str], tensors: Tensors, number: int) -> bool:
    from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear

    rank, ranks = module.tp_rank, module.tp_size
    size = module.input_size_per_partition if isinstance(module, RowParallelLinear) else None
    first = 0 if size is None else rank * size
    size = size or module.input_size
    units = _units(size, number)
    weights, biases = [], []
    for path in paths:
        weight, bias = tensors[f"{path}.weight"], tensors.get(f"{path}.bias")
        columns_ON = weight[:, [first + unit for unit in units]]
        if isinstance(module, ColumnParallelLinear):
            columns_ON = columns_ON.chunk(ranks)[rank]
            bias = None if bias is None else bias.chunk(ranks)[rank]
        weights.append(columns_ON)
        biases += [] if bias is None else [bias]
    found_NO = module.quant_method.apply(module, _one_hot(units, size, module.weight))
    if biases and not _equal(module.bias, torch.cat(biases)):
        return False
    return _equal(found_NO, torch.cat(weights).T)


def _embedding(module: Any, path: str, tensors: Tensors, number: int) -> bool:
    indices = module.shard_indices
    start, size = indices.org_vocab_start_index, indices.num_org_elements
    rows = _units(size, number)
    return _equal(module.weight[rows], tensors[f"{path}.weight"][[start + row for row in rows]])


def _head(module: Any, path: str, tensors: Tensors, number: int) -> bool:
    name = f"{path}.weight" if f"{path}.weight" in tensors else "model.embed_tokens.weight"
    indices, size = module.shard_indices, module.embedding_dim
    start, rows = indices.org_vocab_start_index, indices.num_org_elements
    units = _units(size, number)
    found_NO = module.quant_method.apply(module, _one_hot(units, size, module.weight))
    return _equal(found_NO[:, :rows], tensors[name][start : start + rows, units].T)


def latent_products(model: Any) -> dict[str, Any]:
    """The parameters that layers with latent attention (MLA) make of their ``kv_b_proj``, by name,
    with the layer. Some of vLLM's backends make views, which a pull changes, too; others copies,
    which have to be made again."""
    from vllm.model_executor.layers.attention import MLAAttention

    return {
        f"{path}.{name}": module
        for path, module in model.named_modules()
        if isinstance(module, MLAAttention)
        for name, _ in module.named_parameters(recurse=False)
    }


def _latent(module: Any, path: str, tensors: Tensors, number: int) -> bool:
    projection = module.kv_b_proj
    whole = tensors[f"{path}.kv_b_proj.weight"].chunk(projection.tp_size)[projection.tp_rank]
    units = _units(whole.shape[1], number)
    columns = whole[:, units].view(module.num_heads, -1, len(units))
    keys, values = columns.split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    return _equal(module.W_UK_T[:, :, units], keys) and _equal(
        module.W_UV[:, units], values.transpose(1, 2)
    )


def _experts(module: Any, path: str, tensors: Tensors, number: int) -> bool:
    """The N probes go to different experts of this rank; the other experts of each have the weight
    0."""
    rank, ranks = module.moe_config.tp_rank, module.moe_config.tp_size
    experts, top_k = module.global_num_experts, module.top_k
    weight = tensors[f"{path}.0.gate_proj.weight"]
    units = _units(weight.shape[1], number)
    own = module.expert_map_manager.get_local_expert_ids()
    chosen = [own[(number * _PROBES + probe) % len(own)] for probe in range(_PROBES)]
    x_ND = _one_hot(units, module.hidden_size, module.w13_weight)
    ids_NK = torch.tensor([[(one + k) % experts for k in range(top_k)] for one in chosen])
    weights_NK = torch.zeros(ids_NK.shape)
    weights_NK[:, 0] = 1.0
    found_ND = module.quant_method.apply(
        layer=module,
        x=x_ND,
        topk_weights=weights_NK.to(x_ND.device),
        topk_ids=ids_NK.to(x_ND.device, module.quant_method.topk_indices_dtype or torch.int32),
        shared_experts=None,
        shared_experts_input=None,
    )
    for found_D, expert, unit in zip(found_ND, chosen, units, strict=True):
        gate, up, down = (
            tensors[f"{path}.{expert}.{one}_proj.weight"] for one in ("gate", "up", "down")
        )
        gate_F, up_F = (one[:, unit].chunk(ranks)[rank].float() for one in (gate, up))
        hidden_F = (F.silu(gate_F) * up_F).to(x_ND.dtype).float()
        expected_D = down.chunk(ranks, dim=1)[rank].float() @ hidden_F
        found_D = found_D[: len(expected_D)].float().cpu()
        error = (found_D - expected_D).abs().max()
        if not error <= _TOLERANCE[x_ND.dtype] * expected_D.abs().max():
            return False
    return True


# Of an expert's output, relative to its largest element.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def _units(size: int, number: int) -> list[int]:
    return [(number * _STRIDE + probe * (size // _PROBES)) % size for probe in range(_PROBES)]


def _one_hot(units: Sequence[int], size: int, like: torch.Tensor) -> torch.Tensor:
    x_ND = like.new_zeros(len(units), size)
    x_ND[range(len(units)), list(units)] = 1.0
    return x_ND


def _equal(found: torch.Tensor, published: torch.Tensor) -> bool:
    """Whether the values are the same in the type of ``found``. A product with a unit vector is
    exact, but for float32 on CUDA, which may be computed in TF32."""
    expected = published.to(found.device, found.dtype)
    if found.dtype == torch.float32 and found.is_cuda:
        return torch.allclose(found, expected, rtol=1e-3, atol=0.0)
    return torch.equal(found, expected)
