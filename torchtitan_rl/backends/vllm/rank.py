"""One rank of a replica: its engine and the loop that steps it.

`GlooLockstep`: broadcasts decisions over a gloo group separate from the model's collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.engine import StagedWeights, VllmEngine
from torchtitan_rl.errors import LoopFailedError
from torchtitan_rl.generation.config import GeneratorConfig, LoopConfig
from torchtitan_rl.generation.decision import KvPolicy, LockstepChannel, SoloChannel
from torchtitan_rl.generation.loop import EngineLoop, OnWork


def build_loop(
    spec: GeneratorSpec,
    rank: int,
    weights: StagedWeights | None = None,
    *,
    on_end: Callable[[LoopFailedError | None], None] | None = None,
    on_pulled: Callable[[int], None] | None = None,
    on_work: OnWork | None = None,
) -> EngineLoop:
    """Build the engine, on all ranks together, and its loop; see `EngineLoop` for the callbacks."""
    generator, sync = spec.generator, spec.weight_sync
    return EngineLoop(
        VllmEngine(spec, weights),
        _channel(generator),
        is_leader=rank == 0,
        config=LoopConfig(
            name=spec.name,
            max_steps_per_decision=generator.max_steps_per_decision,
            heartbeat_s=generator.heartbeat_s,
            stream_interval_s=spec.stream_interval_s,
            kv_policy=KvPolicy(
                reset_prefix_cache=sync.reset_prefix_cache_on_pull,
                recompute_running=sync.recompute_running_on_pull,
            ),
        ),
        on_end=on_end,
        on_pulled=on_pulled,
        on_work=on_work,
    )


def _channel(generator: GeneratorConfig) -> LockstepChannel:
    if generator.tensor_parallel == 1:
        return SoloChannel()

    return GlooLockstep(timeout_s=generator.collective_timeout_s)


HEADER_BYTES = 2048  # one message for most decisions: 8 bytes of length, then the payload's head


class GlooLockstep:
    """A `LockstepChannel` from rank 0 of the default process group to all its ranks.

    Created on all ranks in the same order; a broadcast that waits for longer than ``timeout_s``
    raises on the waiting ranks.
    """

    def __init__(self, *, timeout_s: float) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.world_size: int = dist.get_world_size()
        self._header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)

    def broadcast(self, data: bytes | None) -> bytes:
        capacity = HEADER_BYTES - 8  # of the header, for the payload
        if data is not None:
            head = len(data).to_bytes(8, "little") + data[:capacity]
            self._header[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        dist.broadcast(self._header, src=0, group=self._group)
        received = self._header.numpy().tobytes()
        num_bytes = int.from_bytes(received[:8], "little")
        if num_bytes <= capacity:
            return received[8 : 8 + num_bytes]
        rest = torch.empty(num_bytes - capacity, dtype=torch.uint8)
        if data is not None:
            rest.copy_(torch.frombuffer(bytearray(data[capacity:]), dtype=torch.uint8))
        dist.broadcast(rest, src=0, group=self._group)
        return received[8:] + rest.numpy().tobytes()

    def barrier(self) -> None:
        dist.barrier(group=self._group)
