"""Layers with experts (MoE), and the metrics of their routing.

torchtitan's layers, with three differences: experts compute in the type of their input
(torchtitan's round to bfloat16), gates compute in float32 on every device, and a router can be
given the experts of each token (`ReplayRouter.replayed_BLK`). The bias by which torchtitan balances
the experts exists only where checkpoints have it (DeepSeek-V3), and is never updated: a step would
change the experts of tokens without a gradient, and differently from rank to rank.

Shapes: B rows, L tokens of a row, D model dimension, F hidden dimension of an expert, E experts, K
experts of a token, R rows that the experts of this rank compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate

from torchtitan_rl.backends.titan import setup as titan_setup  # noqa: F401 (before torchtitan)

# isort: split
from torchtitan.models.common import Linear
from torchtitan.models.common.config_utils import make_moe_config
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher

from torchtitan_rl.backends.titan.setup import local
from torchtitan_rl.config.model import PolicyArchitecture
from torchtitan_rl.types import UNKNOWN_EXPERT

_NO_INIT = {"w1_EFD": skip_param_init, "w2_EDF": skip_param_init, "w3_EFD": skip_param_init}


def experts_config(architecture: PolicyArchitecture, shared: Any, *, expert_parallel: int) -> Any:
    """Build the ``moe`` configuration of a layer; the architecture must have experts. ``shared``:
    the configuration of the feed-forward network of all shared experts; None without them."""
    a, experts = architecture, architecture.experts
    assert experts is not None
    dispatcher = AllToAllTokenDispatcher if expert_parallel > 1 else LocalTokenDispatcher
    return make_moe_config(
        num_experts=experts.number,
        load_balance_coeff=1.0 if experts.has_biases else None,  # registers the bias
        router=ReplayRouter.Config(
            num_experts=experts.number,
            gate=FloatGate.Config(
                in_features=a.dim,
                out_features=experts.number,
                param_init={"weight": skip_param_init},
            ),
            top_k=experts.per_token,
            score_func="sigmoid" if experts.has_biases else "softmax",
            route_norm=experts.has_normalized_weights,
            route_scale=experts.scale,
            num_expert_groups=experts.num_groups if experts.num_groups > 1 else None,
            num_limited_groups=experts.groups_per_token,
        ),
        routed_experts=RoutedExperts.Config(
            inner_experts=PlainExperts.Config(
                dim=a.dim, hidden_dim=a.hidden_dim, num_experts=experts.number, param_init=_NO_INIT
            ),
            token_dispatcher=dispatcher.Config(num_experts=experts.number, top_k=experts.per_token),
        ),
        shared_experts=shared,
    )


class PlainExperts(GroupedExperts):
    """w2(silu(w1(x)) x w3(x)) of each row's expert, in the type of x."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        w1_EFD, w2_EDF, w3_EFD = (
            local(weight).to(x_RD.dtype) for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        ends_E = torch.cumsum(num_tokens_per_expert_E, 0, dtype=torch.int32)
        gate_RF = self._grouped_mm(A=x_RD, B_t=w1_EFD.transpose(-2, -1), offs=ends_E)
        up_RF = self._grouped_mm(A=x_RD, B_t=w3_EFD.transpose(-2, -1), offs=ends_E)
        return self._grouped_mm(
            A=F.silu(gate_RF) * up_RF, B_t=w2_EDF.transpose(-2, -1), offs=ends_E
        )


class FloatGate(Linear):
    """Scores of experts in float32. torchtitan relies on autocast for this, which does nothing on a
    CPU."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input.float(), self.weight.float())


class ReplayRouter(TokenChoiceTopKRouter):
    """Chooses the experts of each token by the softmax of the gate's scores (DeepSeek-V3: by their
    sigmoids and a bias, from the best groups), or takes them from ``replayed_BLK``. Their weights
    are always those of this gate, so it gets gradients either way. The counts are of the local
    tokens since `reset_counts`; with recomputed activations each token counts twice."""

    replayed_BLK: torch.Tensor | None
    """Experts [B, L, K] of the next passes' tokens, as uint8. The router chooses for tokens with
    `UNKNOWN_EXPERT`; None: for all."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.replayed_BLK = None
        self.load_E: torch.Tensor | None = None
        self.num_replayed: torch.Tensor | float = 0.0
        self.num_mismatched: torch.Tensor | float = 0.0

    def reset_counts(self) -> None:
        self.load_E, self.num_replayed, self.num_mismatched = None, 0.0, 0.0

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return weights and experts [B, L, K], and scores [B, L, E]."""
        logits_BLE = self.gate(x_BLD)
        is_sigmoid = self.score_func == "sigmoid"
        scores_BLE = logits_BLE.sigmoid() if is_sigmoid else F.softmax(logits_BLE, dim=-1)
        choice_BLE = scores_BLE if expert_bias_E is None else scores_BLE + expert_bias_E
        if self.num_expert_groups is not None:
            choice_BLE = self._get_node_limited_routing_scores(choice_BLE)
        experts_BLK = choice_BLE.topk(self.top_k, dim=-1, sorted=False).indices
        if self.replayed_BLK is not None:
            replayed_BLK = _split_like(self.replayed_BLK.long(), scores_BLE)
            self._compare(local(experts_BLK), local(replayed_BLK))
            is_unknown_BLK = replayed_BLK == UNKNOWN_EXPERT
            experts_BLK = torch.where(is_unknown_BLK, experts_BLK, replayed_BLK)
        self._count(local(experts_BLK))
        weights_BLK = scores_BLE.gather(dim=-1, index=experts_BLK)
        if self.route_norm:
            weights_BLK = weights_BLK / weights_BLK.sum(dim=-1, keepdim=True)
        return weights_BLK * self.route_scale, experts_BLK, scores_BLE

    @torch.no_grad()
    def _count(self, experts_BLK: torch.Tensor) -> None:
        if self.load_E is None:
            self.load_E = torch.zeros(self.num_experts, device=experts_BLK.device)
        ones = self.load_E.new_ones(experts_BLK.numel())
        self.load_E.scatter_add_(0, experts_BLK.flatten(), ones)

    @torch.no_grad()
    def _compare(self, own_BLK: torch.Tensor, replayed_BLK: torch.Tensor) -> None:
        is_replayed_BL = (replayed_BLK != UNKNOWN_EXPERT).all(dim=-1)
        differs_BL = (own_BLK.sort(dim=-1)[0] != replayed_BLK.sort(dim=-1)[0]).any(dim=-1)
        self.num_replayed += is_replayed_BL.sum()
        self.num_mismatched += (is_replayed_BL & differs_BL).sum()


def _split_like(values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Split ``values``, which every rank has whole, as ``other`` is."""
    if not isinstance(other, DTensor):
        return values
    mesh = other.device_mesh
    whole = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=other.placements)


def routing_metrics(routers: Iterable[ReplayRouter], *, first_layer: int = 0) -> dict[str, float]:
    """The metrics of the tokens of all ranks since `reset_counts`. ``first_layer``: the number of
    the first layer with experts. Every rank has forwarded tokens. Collective."""
    counts = []
    for router in routers:
        assert router.load_E is not None
        others = torch.tensor([float(router.num_replayed), float(router.num_mismatched)])
        counts.append(torch.cat([router.load_E.double().cpu(), others.double()]))
    if not counts:
        return {}
    counts_XC = torch.stack(counts)  # X layers
    if dist.get_world_size() > 1:  # of tensor-parallel ranks, each routes a part of the tokens
        dist.all_reduce(counts_XC)
    loads_XE, num_replayed = counts_XC[:, :-2], counts_XC[:, -2].sum().item()
    shares_XE = loads_XE / loads_XE.sum(dim=1, keepdim=True)
    num_experts = shares_XE.shape[1]
    load_X = shares_XE.amax(dim=1) * num_experts
    entropy_X = torch.special.entr(shares_XE).sum(dim=1) / math.log(max(2, num_experts))
    metrics = {
        "expert_load_max": load_X.max().item(),
        "expert_entropy_mean": entropy_X.mean().item(),
    }
    of_layers = zip(load_X.tolist(), entropy_X.tolist(), strict=True)
    for layer, (load, entropy) in enumerate(of_layers, start=first_layer):
        metrics |= {f"expert_load/layer_{layer}": load, f"expert_entropy/layer_{layer}": entropy}
    if num_replayed:
        metrics["routing_mismatch"] = counts_XC[:, -1].sum().item() / num_replayed
    return metrics
