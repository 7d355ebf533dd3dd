"""The policies of all `FAMILIES` as torchtitan models.

All use torchtitan's Qwen3, with or without its norms on queries and keys, and biases there.
(torchtitan's own Llama permutes rotary halves on load, which FSDP2 cannot do with an odd number of
heads.)

Shapes: B rows, L tokens, D model dimension, S selected tokens, V vocabulary; T tokens of a forward
pass, in one row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan_rl.backends.titan import setup as titan_setup  # noqa: F401 (before torchtitan)

# isort: split
from torchtitan.config import CompileConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import Embedding, FeedForward, Linear
from torchtitan.models.common.attention import (
    FlexAttention,
    VarlenAttention,
    create_attention_mask,
)
from torchtitan.models.common.config_utils import make_gqa_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.models.qwen3.sharding import set_qwen3_sharding_config

from torchtitan_rl.backends.titan.layers import CpuFeedForward, CpuRMSNorm, ScaledRoPE
from torchtitan_rl.backends.titan.setup import Layout
from torchtitan_rl.backends.titan.tree_attention import (
    TreeAttention,
    tree_mask_mod,
    tree_nodes,
)
from torchtitan_rl.config.model import PolicyArchitecture
from torchtitan_rl.training.config import TrainerConfig

_NO_INIT = {
    "weight": skip_param_init,
    "bias": skip_param_init,
}  # all weights come from the checkpoint


class PolicyModel(Qwen3Model):
    """torchtitan's decoder, which computes logits of selected tokens only: the head is most of a
    small model's work, and only trained tokens need it."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        pass

    def forward(
        self,
        tokens_BL: torch.Tensor,
        positions_BL: torch.Tensor,
        attention_masks: Any,
        selected_S: torch.Tensor,
    ) -> torch.Tensor:
        """Logits [1, S, V] (vocabulary-sharded DTensor under tensor parallelism) of the tokens at
        ``selected_S``, indices into the flattened [B * L]."""
        h_BLD = self.tok_embeddings(tokens_BL)
        for layer in self.layers.values():
            h_BLD = layer(h_BLD, attention_masks, positions_BL)
        h_BLD = self.norm(h_BLD)
        if isinstance(h_BLD, DTensor):  # replicated over the tensor-parallel ranks by now
            h_BLD = h_BLD.to_local()
        logits_1SV: torch.Tensor = self.lm_head(h_BLD.flatten(0, 1)[None, selected_S])
        return logits_1SV

    def get_attention_masks(self, positions_1T: torch.Tensor, subtree_end_T: torch.Tensor) -> Any:
        """What the layers' attention takes, made once for all of them: query q sees key k if
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
        # Varlen knows documents only, which start where the position is 0.
        return super().get_attention_masks(positions_1T)


def build_policy(
    architecture: PolicyArchitecture, config: TrainerConfig, layout: Layout, *, dtype: str
) -> PolicyModel:
    """A parallelized model on its device that computes in ``dtype``. Its float32 weights are *not
    set yet*."""
    return build_model(policy_config(architecture, config, layout, dtype), config, layout, dtype)


def build_model(
    model_config: Any, config: TrainerConfig, layout: Layout, dtype: str
) -> PolicyModel:
    """As `build_policy`, of a configuration that may have been changed."""
    if config.compile and layout.device.type == "cpu":
        # Forward passes have any number of tokens: one compilation is for all of them.
        torch._dynamo.config.assume_static_by_default = False
    with torch.device("meta"):
        bare = model_config.build()
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
    return model


def policy_config(
    architecture: PolicyArchitecture, config: TrainerConfig, layout: Layout, dtype: str
) -> Any:
    """The `PolicyModel.Config` of an architecture."""
    a = architecture
    is_cpu = layout.device.type == "cpu"
    norm_config = CpuRMSNorm.Config if is_cpu else RMSNorm.Config
    ffn_config = CpuFeedForward.Config if is_cpu else FeedForward.Config
    norm = partial(norm_config, eps=a.norm_eps, param_init=_NO_INIT)
    linear = partial(Linear.Config, param_init=_NO_INIT)
    layers = [
        Qwen3TransformerBlock.Config(
            attention_norm=norm(normalized_shape=a.dim),
            ffn_norm=norm(normalized_shape=a.dim),
            attention=_attention(a, config, layout, dtype, norm),
            feed_forward=ffn_config(
                w1=linear(in_features=a.dim, out_features=a.hidden_dim),
                w2=linear(in_features=a.hidden_dim, out_features=a.dim),
                w3=linear(in_features=a.dim, out_features=a.hidden_dim),
            ),
        )
        for _ in range(a.num_layers)
    ]
    model_config = PolicyModel.Config(
        dim=a.dim,
        vocab_size=a.vocab_size,
        tok_embeddings=Embedding.Config(
            num_embeddings=a.vocab_size, embedding_dim=a.dim, param_init=_NO_INIT
        ),
        norm=norm(normalized_shape=a.dim),
        lm_head=linear(in_features=a.dim, out_features=a.vocab_size),
        layers=layers,
        enable_weight_tying=a.has_tied_embeddings,
    )
    set_qwen3_sharding_config(
        model_config, enable_sp=layout.parallelism.enable_sequence_parallel, enable_ep=False
    )
    return model_config


def _attention(
    architecture: PolicyArchitecture,
    config: TrainerConfig,
    layout: Layout,
    dtype: str,
    norm: Callable[..., Any],
) -> Any:
    a = architecture
    attention = make_gqa_config(
        dim=a.dim,
        n_heads=a.num_heads,
        n_kv_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        wqkv_param_init=_NO_INIT,
        wo_param_init=_NO_INIT,
        inner_attention=_inner_attention(layout.device, dtype, config),
        rope=_rope(a, config.max_episode_tokens),
        qk_norm=norm(normalized_shape=a.head_dim) if a.has_qk_norm else None,
    )
    attention.qkv_linear.wq.bias = attention.qkv_linear.wkv.bias = a.has_qkv_bias
    return attention


def _rope(architecture: PolicyArchitecture, row_len: int) -> Any:
    scaling = architecture.rope_scaling
    scaled: dict[str, Any] = {} if scaling is None else {"scaling": "llama", **asdict(scaling)}
    # Positions are depths in a tree, so none exceeds the length of an episode.
    return ScaledRoPE.Config(
        dim=architecture.head_dim, max_seq_len=row_len, theta=architecture.rope_theta, **scaled
    )


def _inner_attention(device: torch.device, dtype: str, config: TrainerConfig) -> Any:
    if device.type == "cpu":
        return TreeAttention.Config()
    # varlen's kernels know no trees, and do not support float32.
    is_varlen = dtype == "bfloat16" and not config.share_prefixes
    return VarlenAttention.Config() if is_varlen else FlexAttention.Config()
