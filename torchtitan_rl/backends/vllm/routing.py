"""Records which experts computed each token of a request, for `rollout.replay_routing`.

vLLM calls a function of each layer with experts (MoE) with the experts of a step's tokens. They are
kept by slot of the KV cache, so those of a cached prefix are found too. After each step, those of
the tokens that it computed are copied to their request. This is vLLM's interface on a CPU; on CUDA
nothing is recorded, and the trainer's routers choose.

Invariants
- The experts of a slot are those of the weights with which its keys and values were computed.
- Once a request has sampled a token, the experts of all tokens before it stay, even if they are
  computed again (after a preemption, or a pull that recomputes running requests): with these it was
  sampled.

Shapes: T tokens of a step, X layers, K experts of a token, N slots.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from torchtitan_rl.types import RoutedExperts


def make_recorder(worker: Any) -> RoutingRecorder | None:
    """Return the recorder of an engine's worker, on a CPU; None if its model has no experts."""
    from vllm.model_executor.layers.fused_moe import MoERunner

    layers = [one for one in worker.get_model().modules() if isinstance(one, MoERunner)]
    return RoutingRecorder(worker.model_runner, layers) if layers else None


class RoutingRecorder:
    def __init__(self, runner: Any, layers: list[Any]) -> None:
        self._batch = runner.input_batch
        self._block_size = int(self._batch.block_table[0].block_size)
        num_slots = runner.kv_cache_config.num_blocks * self._block_size
        per_token = layers[0].moe_config.experts_per_token
        self._slots_NXK = np.zeros((num_slots, len(layers), per_token), dtype=np.uint8)
        for number, layer in enumerate(sorted(layers, key=lambda one: one.layer_id)):
            layer.router.set_capture_fn(partial(self._take, number))

    def read(self, request_id: str, experts: bytearray, num_tokens: int) -> None:
        """Append to ``experts``, which are those of a request's first tokens, until they are of the
        first ``num_tokens``. The last step must have computed one of the missing ones."""
        positions = np.arange(len(experts) // self._width, num_tokens)
        if not len(positions):
            return
        table = self._batch.block_table[0].block_table.np[self._batch.req_id_to_index[request_id]]
        blocks = table[positions // self._block_size].astype(np.int64)
        slots = blocks * self._block_size + positions % self._block_size
        experts += self._slots_NXK[slots].tobytes()

    def part(self, experts: bytearray, start: int, end: int) -> RoutedExperts:
        """Return the experts of the request's tokens from ``start`` to ``end``."""
        _, num_layers, per_token = self._slots_NXK.shape
        data = bytes(experts[start * self._width : end * self._width])
        return RoutedExperts(data=data, num_layers=num_layers, per_token=per_token)

    @property
    def _width(self) -> int:
        return self._slots_NXK.shape[1] * self._slots_NXK.shape[2]

    def _take(self, layer: int, experts_TK: torch.Tensor) -> None:
        from vllm.forward_context import get_forward_context

        slots_of = get_forward_context().slot_mapping
        if not slots_of:  # vLLM measures its memory
            return
        slots_T = next(iter(slots_of.values()))[: len(experts_TK)].numpy()
        is_token_T = slots_T >= 0  # the rest is padding
        experts_TK = experts_TK[: len(slots_T)]
        self._slots_NXK[slots_T[is_token_T], layer] = experts_TK.numpy()[is_token_T]
