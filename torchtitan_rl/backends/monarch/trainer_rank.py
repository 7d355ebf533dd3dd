"""What runs in a trainer process: the policy trainer, and on rank 0 its publisher of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan_rl.backends.specs import TrainerSpec
from torchtitan_rl.backends.titan.joint_publishing import JointPublisher, all_on_one_host
from torchtitan_rl.backends.titan.trainer import PolicyTrainer
from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.observability.trace import Tracer, host_label
from torchtitan_rl.training.batch import StepOutput, TrainingBatch
from torchtitan_rl.weights.handle import WeightHandle
from torchtitan_rl.weights.shared_memory import SharedMemoryPublisher
from torchtitan_rl.weights.transport import Transport, WeightPublisher


class TrainerRank:
    """Made and called in one thread of its process, on all ranks together."""

    def __init__(self, spec: TrainerSpec, rank: int, transport: Transport) -> None:
        self._tracer = Tracer(spec.trace_dir, f"trainer rank {rank}", host=host_label())
        with self._tracer.span("start"):
            self._trainer = PolicyTrainer(
                spec.checkpoint,
                spec.trainer,
                seed=spec.seed,
                max_steps=spec.num_steps,
                dtype=spec.dtype,
            )
            self._publisher = _publisher(spec, transport) if rank == 0 else None
            self._joint = _joint_publisher(self._publisher, spec, transport)

    def train_step(self, batch: TrainingBatch) -> StepOutput:
        with self._tracer.span("optimizer step", tokens=batch.num_tokens):
            return self._trainer.train_step(batch)

    def publish(self, keep: frozenset[int]) -> WeightHandle | None:
        """Collective; the handle on rank 0, None elsewhere."""
        version = self._trainer.version
        with self._tracer.span("publish", version=version):
            parts = None if self._joint is None else self._trainer.hf_parts()
            if self._joint is not None and parts is not None:
                with self._tracer.span("write weights", version=version):
                    return self._joint.publish(version, parts, keep=keep)
            with self._tracer.span("gather weights", version=version):
                tensors = self._trainer.hf_state_dict()
            if self._publisher is None:
                return None
            with self._tracer.span("write weights", version=version):
                return self._publisher.publish(version, tensors, keep=keep)

    def save_checkpoint(
        self, path: Path, state: dict[str, Any], attachments: Mapping[str, bytes], version: int
    ) -> None:
        """Collective; returns when everything is copied.

        Raises:
            CheckpointError: the weights are not those of ``version``, which ``state`` belongs to.
        """
        if self._trainer.version != version:
            raise CheckpointError(
                f"{path} is not written: the trainer holds version {self._trainer.version} and the "
                f"run is at version {version}; a step ended after its deadline"
            )
        with self._tracer.span("stage checkpoint"):
            self._trainer.save_checkpoint(path, state, attachments)

    def finish_checkpoint(self) -> None:
        """Called in another thread, while other methods may run."""
        with self._tracer.span("write checkpoint", track="checkpoint"):
            self._trainer.finish_checkpoint()

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        with self._tracer.span("load checkpoint"):
            return self._trainer.load_checkpoint(path)

    def offload(self) -> None:
        with self._tracer.span("offload"):
            self._trainer.offload()

    def onload(self) -> None:
        with self._tracer.span("onload"):
            self._trainer.onload()

    def export_hf(self, path: Path) -> None:
        with self._tracer.span("export"):
            self._trainer.export_hf(path)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self._trainer.close()
        self._tracer.close()


def _joint_publisher(
    publisher: WeightPublisher | None, spec: TrainerSpec, transport: Transport
) -> JointPublisher | None:
    """Where all ranks can write into the same memory. Collective."""
    if transport is not Transport.SHARED_MEMORY:
        return None
    if not all_on_one_host():
        return None
    assert publisher is None or isinstance(publisher, SharedMemoryPublisher)
    return JointPublisher(publisher)


def _publisher(spec: TrainerSpec, transport: Transport) -> WeightPublisher:
    if transport is Transport.RDMA:
        from torchtitan_rl.backends.monarch.rdma import MonarchRdmaPublisher

        return MonarchRdmaPublisher()
    return SharedMemoryPublisher(spec.run_dir.name, spec.run_dir)
