"""The policies of all `FAMILIES` as torchtitan models.

All families use torchtitan's Qwen3, with or without norms on queries and keys, with or without
biases of queries, keys and values, dense or with experts (`experts.py`); DeepSeek-V3 uses it with
torchtitan's latent attention. (torchtitan's own Llama permutes rotary halves on load, which FSDP2
cannot do with an odd number of heads.) Rotary embeddings can use the frequencies of Llama 3.1,
YaRN's (DeepSeek-V3), or rows and columns of images.

On the CPU, PyTorch has no fused kernels for norms, rotary embeddings and SwiGLU layers. With
torchtitan's layers, norms and rotations took a fifth of a step of a small policy; the layers of
this module need fewer passes over memory. The hidden tensors of SwiGLU layers are the largest of a
step: this module keeps two of them for the backward pass, where autograd keeps four. Compiled
models, tensors that are split over ranks, and SwiGLU layers with adapters use torchtitan's layers.

Shapes: B rows, L tokens, D model dimension, S selected tokens, V vocabulary; T tokens of a forward
pass, in one row; X layers, K experts of a token; in layers, H elements normalized or rotated
together, F hidden dimension.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from torch.distributed.tensor import DTensor, distribute_tensor

from torchtitan_rl.backends.titan import setup as titan_setup  # noqa: F401 (before torchtitan)

# isort: split
from torchtitan.components.lora import LoRAConverter
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import CosSinRoPE, Embedding, FeedForward, Linear
from torchtitan.models.common.attention import FlexAttention, VarlenAttention, create_attention_mask
from torchtitan.models.common.config_utils import make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.deepseek_v3 import make_mla_attention_config
from torchtitan.models.deepseek_v3.sharding import set_deepseek_v3_sharding_config
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from torchtitan_rl.backends.titan.context_parallel import exchange_heads
from torchtitan_rl.backends.titan.experts import ReplayRouter, experts_config
from torchtitan_rl.backends.titan.setup import Layout, local
from torchtitan_rl.backends.titan.tree_attention import TreeAttention, tree_mask_mod, tree_nodes
from torchtitan_rl.backends.titan.vision import (
    ImageInputs,
    init_tower_buffers,
    make_tower,
    with_images,
)
from torchtitan_rl.config.deepseek import LatentAttention
from torchtitan_rl.config.lora import LoraConfig
from torchtitan_rl.config.model import PolicyArchitecture
from torchtitan_rl.images import ImageReader
from torchtitan_rl.rope_fields import Llama3Scaling, YarnScaling
from torchtitan_rl.training.config import TrainerConfig

# All weights come from the checkpoint.
_NO_INIT = {"weight": skip_param_init, "bias": skip_param_init}
LORA_A, LORA_B = ".lora_a.", ".lora_b."  # in names of parameters
_WITHOUT_ADAPTERS = LoraConfig()
_LORA_LAYERS = {  # torchtitan's names of `LoraConfig.target_modules`
    "q_proj": "wq",
    "k_proj": "wkv",
    "v_proj": "wkv",
    "o_proj": "wo",
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
}


class PolicyModel(Qwen3Model):
    """torchtitan's decoder, except that logits are computed only for selected tokens. The head
    takes most of a small model's time, and only trained tokens need logits."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        latent: LatentAttention | None = None
        mtp_layers: list[Any] = field(default_factory=list)  # which DeepSeek-V3's shardings read
        vision: Mapping[str, Any] | None = None  # `Vision.tower`

    reader: ImageReader | None = None
    """Reads the images of a policy with a vision tower."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.vision is not None:
            self.visual = make_tower(config.vision)

    def forward(
        self,
        tokens_BL: torch.Tensor,
        positions_BL: torch.Tensor,
        attention_masks: Any,
        selected_S: torch.Tensor,
        routed_experts_BLXK: torch.Tensor | None = None,
        images: ImageInputs | None = None,
        *,
        has_head: bool = True,
    ) -> torch.Tensor:
        """Compute logits [1, S, V] (a vocabulary-sharded DTensor under tensor parallelism) at the
        positions ``selected_S``, which index the flattened tokens [B * L]. Without ``has_head``
        return what ``lm_head`` would take, [1, S, D].

        ``routed_experts_BLXK``: the experts of each token and layer, see `ReplayRouter`; None: the
        routers choose. ``images`` are the images among the tokens; then the positions are
        [B, L, 3], see `rope_positions`."""
        for number, router in enumerate(self.routers()):
            experts = routed_experts_BLXK
            router.replayed_BLK = None if experts is None else experts[:, :, number].contiguous()
        h_BLD = self.tok_embeddings(tokens_BL)
        if images is not None:
            h_BLD = with_images(h_BLD, self.visual, images)
        for layer in self.layers.values():
            h_BLD = layer(h_BLD, attention_masks, positions_BL)
        h_BLD = local(self.norm(h_BLD))  # replicated over the tensor-parallel ranks
        h_1SD = h_BLD.flatten(0, 1)[None, selected_S]
        return self.lm_head(h_1SD) if has_head else h_1SD

    def routers(self) -> list[ReplayRouter]:
        return [one for one in self.layers.modules() if isinstance(one, ReplayRouter)]

    def get_attention_masks(self, positions_1T: torch.Tensor, subtree_end_T: torch.Tensor) -> Any:
        """Build the mask that the attention of all layers takes: query q sees key k if
        ``k <= q < subtree_end[k]``."""
        match self.config.first_attention.inner_attention:
            case TreeAttention.Config():
                return tree_nodes(subtree_end_T)
            case FlexAttention.Config():
                size = len(subtree_end_T)
                mask_mod = tree_mask_mod(subtree_end_T)
                return create_attention_mask(
                    mask_mod, 1, None, size, size, device=subtree_end_T.device
                )
        # Varlen supports only documents; a document starts where the position is 0.
        return super().get_attention_masks(positions_1T)


def build_policy(
    architecture: PolicyArchitecture,
    config: TrainerConfig,
    layout: Layout,
    *,
    dtype: str,
    lora: LoraConfig = _WITHOUT_ADAPTERS,
) -> PolicyModel:
    """Build a parallelized model, on its device, that computes in ``dtype``. Its float32 weights
    are *not initialized*. With ``lora`` only its adapters require gradients, and the others are
    ``dtype``."""
    model_config = policy_config(architecture, config, layout, dtype, lora)
    return build_model(model_config, config, layout, dtype)


def build_model(
    model_config: Any, config: TrainerConfig, layout: Layout, dtype: str
) -> PolicyModel:
    """Build a model from a configuration of torchtitan's; see `build_policy`."""
    if config.compile and layout.device.type == "cpu":
        # Forward passes differ in their number of tokens; one compilation serves all lengths.
        torch._dynamo.config.assume_static_by_default = False
    with torch.device("meta"):
        bare = model_config.build()
    if layout.context_group is not None:
        # As torchtitan does: before it wraps them for tensor parallelism.
        for layer in bare.layers.values():
            attention = layer.attention.inner_attention
            attention.forward = exchange_heads(attention.forward, layout.context_group)
    if any(adapter_layers(bare)):  # FSDP would round the base to this type in each pass
        for parameter in bare.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, dtype))
    if model_config.vision is not None:
        bare.visual.requires_grad_(config.train_vision_tower)
    model: PolicyModel = parallelize_qwen3(
        bare,
        parallel_dims=layout.dims,
        training=TrainingConfig(
            seq_len=config.max_tokens_per_microbatch,
            local_batch_size=1,
            mixed_precision_param=dtype,
            mixed_precision_reduce="float32",
        ),
        parallelism=layout.parallelism,
        compile_config=CompileConfig(enable=config.compile, components=["model"]),
        ac_config={"none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()}[
            config.activation_checkpointing
        ],
        dump_folder="",
    )
    if layout.device.type == "cpu":
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                # gloo cannot scale during a reduction.
                module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device=layout.device)
    with torch.no_grad():
        model.init_weights(buffer_device=layout.device)
    if model_config.vision is not None:
        init_tower_buffers(model.visual, layout.device)
    return model


def policy_config(
    architecture: PolicyArchitecture,
    config: TrainerConfig,
    layout: Layout,
    dtype: str,
    lora: LoraConfig = _WITHOUT_ADAPTERS,
) -> Any:
    a = architecture
    is_cpu, ep = layout.device.type == "cpu", config.expert_parallel
    norm_config = CpuRMSNorm.Config if is_cpu else RMSNorm.Config
    norm = partial(norm_config, eps=a.norm_eps, param_init=_NO_INIT)
    linear = partial(Linear.Config, param_init=_NO_INIT)
    # `CpuFeedForward` would not call adapters of its linear layers.
    swiglu = CpuFeedForward if is_cpu and not lora.rank else FeedForward
    is_latent = a.latent is not None
    attention = _latent_attention if is_latent else _attention
    inner = partial(_inner_attention, layout.device, dtype, config, is_latent=is_latent)

    def feed_forward(hidden_dim: int) -> Any:
        return swiglu.Config(
            w1=linear(in_features=a.dim, out_features=hidden_dim),
            w2=linear(in_features=hidden_dim, out_features=a.dim),
            w3=linear(in_features=a.dim, out_features=hidden_dim),
        )

    def block(number: int) -> Any:
        dense = shared = None
        experts, is_dense = a.experts, number < a.num_layers - a.num_expert_layers
        if experts is None or is_dense:
            dense = feed_forward(a.hidden_dim if experts is None else experts.dense_hidden_dim)
        elif experts.num_shared:
            shared = feed_forward(experts.num_shared * a.hidden_dim)
        return Qwen3TransformerBlock.Config(
            attention_norm=norm(normalized_shape=a.dim),
            ffn_norm=norm(normalized_shape=a.dim),
            attention=attention(a, norm, inner=inner(), rope=_rope(a, config.max_episode_tokens)),
            feed_forward=dense,
            moe=None if dense else experts_config(a, shared, expert_parallel=ep),
        )

    model_config = PolicyModel.Config(
        dim=a.dim,
        vocab_size=a.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=a.vocab_size, embedding_dim=a.dim, param_init=_NO_INIT
        ),
        norm=norm(normalized_shape=a.dim),
        lm_head=linear(in_features=a.dim, out_features=a.vocab_size),
        layers=[block(number) for number in range(a.num_layers)],
        enable_weight_tying=a.has_tied_embeddings,
        latent=a.latent,
        vision=None if a.vision is None else a.vision.tower,
    )
    set_shardings = (
        set_qwen3_sharding_config if a.latent is None else set_deepseek_v3_sharding_config
    )
    set_shardings(
        model_config, enable_sp=layout.parallelism.enable_sequence_parallel, enable_ep=ep > 1
    )
    if not lora.rank:
        return model_config
    layers = sorted({_LORA_LAYERS[name] for name in lora.target_modules})
    converter = LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=layers)
    return converter.build().convert(model_config)


def _attention(a: PolicyArchitecture, norm: Callable[..., Any], inner: Any, rope: Any) -> Any:
    attention = make_gqa_config(
        dim=a.dim,
        n_heads=a.num_heads,
        n_kv_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        wqkv_param_init=_NO_INIT,
        wo_param_init=_NO_INIT,
        inner_attention=inner,
        rope=rope,
        qk_norm=norm(normalized_shape=a.head_dim) if a.has_qk_norm else None,
    )
    attention.qkv_linear.wq.bias = attention.qkv_linear.wkv.bias = a.has_qkv_bias
    return attention


def _latent_attention(
    a: PolicyArchitecture, norm: Callable[..., Any], inner: Any, rope: Any
) -> Any:
    latent = a.latent
    assert latent is not None
    attention = make_mla_attention_config(
        layer_id=0,
        dim=a.dim,
        n_heads=a.num_heads,
        q_lora_rank=latent.query_rank or 0,
        kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=a.head_dim - latent.rope_dim,
        qk_rope_head_dim=latent.rope_dim,
        v_head_dim=latent.value_dim,
        mscale=a.rope_scaling.mscale if isinstance(a.rope_scaling, YarnScaling) else 1.0,
        attn_backend="flex",
        linear_init=_NO_INIT,
        norm_init=_NO_INIT,
        depth_init=lambda _: _NO_INIT,
        rope=rope,
    )
    attention.inner_attention = inner
    attention.q_norm = norm(normalized_shape=latent.query_rank or 1)
    attention.kv_norm = norm(normalized_shape=latent.kv_rank)
    return attention


def _rope(architecture: PolicyArchitecture, row_len: int) -> Any:
    latent, scaled = architecture.latent, {}
    match architecture.rope_scaling:
        case Llama3Scaling() as scaling:
            scaled = {"scaling": "llama", **asdict(scaling)}
        case YarnScaling() as scaling:
            scaled = {"scaling": "yarn", **asdict(scaling)}
            del scaled["mscale"]  # of attention
    # Positions are depths in a tree, so none exceeds the length of an episode.
    if architecture.vision is not None:
        scaled["sections"] = architecture.vision.rope_sections
    return (ScaledRoPE if latent is None else InterleavedRoPE).Config(
        dim=architecture.head_dim if latent is None else latent.rope_dim,
        max_seq_len=row_len,
        theta=architecture.rope_theta,
        **scaled,
    )


def _inner_attention(
    device: torch.device, dtype: str, config: TrainerConfig, *, is_latent: bool = False
) -> Any:
    if device.type == "cpu":
        return TreeAttention.Config()
    # varlen's kernels support neither trees nor float32, and need keys and values of one length.
    can_be_varlen = dtype == "bfloat16" and not config.share_prefixes and not is_latent
    is_varlen = can_be_varlen and _has_varlen_kernels()
    return VarlenAttention.Config() if is_varlen else FlexAttention.Config()


def _has_varlen_kernels() -> bool:
    """Whether the kernels are installed that torchtitan loads for this device: packages that PyPI
    does not have on Hopper (FlashAttention 3) and Blackwell (4), torch's own before them."""
    try:
        VarlenAttention.Config().build()
    except ImportError:
        return False
    return True


class CpuRMSNorm(RMSNorm):
    """x / sqrt(mean(x^2) + eps) x weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not is_plain(x):
            return super().forward(x)
        return _Norm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_H, scale)
        return (x * scale).mul_(weight_H)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # With s the scale and z = grad x weight: s z - x s^3 mean(x z).
        x, weight_H, scale = ctx.saved_tensors
        size = x.shape[-1]
        inner = (grads[0] * x).reshape(-1, size)
        grad_weight_H = scale.reshape(1, -1).mm(inner)[0] if ctx.needs_input_grad[1] else None
        common = inner.mv(weight_H).reshape(scale.shape).mul_(scale.pow(3)).div_(-size)
        return (grads[0] * weight_H).mul_(scale).addcmul_(x, common), grad_weight_H, None


def is_plain(*tensors: torch.Tensor) -> bool:
    """Whether the CPU layers of this module can compute with the tensors."""
    are_on_cpu = all(x.device.type == "cpu" for x in tensors)
    are_split = any(isinstance(x, DTensor) for x in tensors)
    return are_on_cpu and not are_split and not torch.compiler.is_compiling()


class ScaledRoPE(CosSinRoPE):
    """Rotary embeddings from cosines and sines [max_seq_len, 2 * dim], with support for
    ``scaling="llama"``: torchtitan has it only where adjacent elements are rotated together, for
    which Hugging Face's weights would have to be permuted. With ``sections``, positions [1, L, 3]
    are triples, and each section of a head's pairs rotates by another one of them (multimodal
    RoPE)."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        sections: tuple[int, ...] = ()

    def _reshape_cache(
        self, query: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        if positions is None or not self.config.sections:
            return super()._reshape_cache(query, positions)
        of_pairs = [axis for axis, size in enumerate(self.config.sections) for _ in range(size)]
        axis_W = torch.tensor(4 * of_pairs, device=positions.device)  # cosines, sines; two halves
        cache_L3W = self.cache[positions[0]]
        index_L1W = axis_W.expand(len(cache_L3W), 1, -1)
        return cache_L3W.gather(1, index_L1W)[None]

    @staticmethod
    def apply_rotary_emb(
        query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not is_plain(query):
            return CosSinRoPE.apply_rotary_emb(query, key, rope_cache)
        cosine, sine = rope_cache.chunk(2, dim=-1)
        return (
            _Rotation.apply(query, cosine, sine),  # type: ignore[no-untyped-call]
            _Rotation.apply(key, cosine, sine),  # type: ignore[no-untyped-call]
        )

    def _precompute_cache(self) -> torch.Tensor:
        config = self.config
        if config.scaling != "llama":
            return super()._precompute_cache()
        frequencies = config.theta ** -(torch.arange(0, config.dim, 2).float() / config.dim)
        # Llama 3.1 divides the frequencies of long wavelengths by the factor and keeps those of
        # short ones. In between it interpolates by the number of rotations in the original context.
        rotations = config.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (rotations - config.low_freq_factor) / (
            config.high_freq_factor - config.low_freq_factor
        )
        kept = kept.clamp(0.0, 1.0)
        frequencies = frequencies * (kept + (1.0 - kept) / config.scaling_factor)
        positions = torch.arange(config.max_seq_len, dtype=torch.float32)
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


class InterleavedRoPE(ScaledRoPE):
    """Rotates adjacent elements together. The results are in the order of `ScaledRoPE`, in queries
    and keys alike, as in transformers: products do not depend on the order."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledRoPE.Config):
        pass

    @staticmethod
    def apply_rotary_emb(
        query: torch.Tensor, key: torch.Tensor, rope_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return ScaledRoPE.apply_rotary_emb(_in_halves(query), _in_halves(key), rope_cache)


def _in_halves(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


class _Rotation(torch.autograd.Function):
    """Rotates heads. The two halves of a head are the two coordinates of its points. The backward
    pass rotates the gradient back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(x, cosine, sine, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _rotate(grads[0], *ctx.saved_tensors, back=True), None, None


def _rotate(
    x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor, *, back: bool
) -> torch.Tensor:
    out = x * cosine
    (x1, x2), (s1, s2) = x.chunk(2, dim=-1), sine.chunk(2, dim=-1)
    (out1, out2), sign = out.chunk(2, dim=-1), 1 if back else -1
    out1.addcmul_(x2, s1, value=sign)
    out2.addcmul_(x1, s2, value=-sign)
    return out


class CpuFeedForward(FeedForward):
    """w2(silu(w1(x)) x w3(x))."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.w1.weight, self.w2.weight, self.w3.weight)
        if not is_plain(x, *weights):
            return super().forward(x)
        return _SwiGLU.apply(x, *weights)  # type: ignore[no-untyped-call]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w1_FD: torch.Tensor, w2_DF: torch.Tensor, w3_FD: torch.Tensor
    ) -> torch.Tensor:
        x_TD = x.flatten(0, -2)
        gate_TF, up_TF = x_TD.mm(w1_FD.T), x_TD.mm(w3_FD.T)
        ctx.save_for_backward(x_TD, w1_FD, w2_DF, w3_FD, gate_TF, up_TF)
        return F.silu(gate_TF).mul_(up_TF).mm(w2_DF.T).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x_TD, w1_FD, w2_DF, w3_FD, gate_TF, up_TF = ctx.saved_tensors
        grad_TD = grads[0].reshape(x_TD.shape)
        silu_TF = F.silu(gate_TF)
        grad_w2_DF = grad_TD.T.mm(silu_TF * up_TF)
        grad_hidden_TF = grad_TD.mm(w2_DF)
        grad_up_TF = silu_TF.mul_(grad_hidden_TF)
        grad_gate_TF = torch.ops.aten.silu_backward(grad_hidden_TF.mul_(up_TF), gate_TF)
        grad_x_TD = grad_gate_TF.mm(w1_FD).addmm_(grad_up_TF, w3_FD)
        grad_w1_FD, grad_w3_FD = grad_gate_TF.T.mm(x_TD), grad_up_TF.T.mm(x_TD)
        return grad_x_TD.view(grads[0].shape), grad_w1_FD, grad_w2_DF, grad_w3_FD


def adapter_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield torchtitan's linear layers with adapters, ``lora_a`` and ``lora_b``, by name."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_a"):
            yield name, module


def init_adapters(model: torch.nn.Module, seed: int) -> None:
    """Initialize adapters as PEFT does: A uniform within 1 / sqrt(in), B zero. Each A is drawn
    whole, from its name and the seed, so that it is the same in every parallel layout."""
    for name, weight in model.state_dict().items():  # whose tensors are the parameters'
        if LORA_B in name:
            weight.zero_()
        elif LORA_A in name:
            seeded = xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) >> 1
            whole = torch.empty(weight.shape, dtype=weight.dtype)
            generator = torch.Generator().manual_seed(seeded)
            torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            whole = whole.to(weight.device)
            if isinstance(weight, DTensor):
                whole = distribute_tensor(
                    whole, weight.device_mesh, weight.placements, src_data_rank=None
                )
            weight.copy_(whole)


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Turn the adapters off: the model computes as its base."""
    layers = [layer for _, layer in adapter_layers(model)]
    scalings = [layer._lora_scaling for layer in layers]  # torchtitan has no switch
    try:
        for layer in layers:
            layer._lora_scaling = 0.0
        yield
    finally:
        for layer, scaling in zip(layers, scalings, strict=True):
            layer._lora_scaling = scaling


_DIGEST_BITS = 52  # a float holds such integers exactly
_DIGEST_CHUNK = 1 << 24  # elements
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)  # a multiplier that spreads positions over 64 bits


def weights_digest(parameters: Iterable[torch.Tensor]) -> int:
    """Return a digest of the weights of all ranks, of 52 bits. Equal weights in the same parallel
    layout and on the same kind of device have the same digest. Collective."""
    digest = xxhash.xxh3_64()
    on_device: list[torch.Tensor] = []
    for parameter in parameters:
        own = local(parameter).detach().contiguous()
        if own.device.type == "cpu":
            # Not by `numpy`, after which torch could not release the storage (`DeviceMemory`).
            digest.update((ctypes.c_char * own.nbytes).from_address(own.data_ptr()))
        else:
            on_device.append(weighted_sum(own))
    if on_device:
        digest.update(torch.stack(on_device).cpu().numpy().data)
    of_rank = torch.tensor([digest.intdigest() >> 1])
    of_ranks = [torch.empty_like(of_rank) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, of_rank)
    together = xxhash.xxh3_64_intdigest(torch.cat(of_ranks).numpy().data)
    return together >> (64 - _DIGEST_BITS)


def weighted_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over the elements of their bits times an odd number that depends on the
    position, modulo 2^64. Copies nothing from the device; its result does not depend on the order
    of the additions."""
    bits = values.view(-1).view({2: torch.int16, 4: torch.int32}[values.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, len(bits), _DIGEST_CHUNK):
        chunk = bits[start : start + _DIGEST_CHUNK].long()
        positions = torch.arange(start, start + len(chunk), device=values.device)
        total += (chunk * (positions.mul_(_ODD).bitwise_or_(1))).sum()
    return total
