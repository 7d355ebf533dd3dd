"""What runs in a trainer process: the policy trainer, and its publishers of weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from torchtitan_rl.backends.specs import TrainerSpec
from torchtitan_rl.backends.titan.publishing import JointPublisher, RemotePublisher
from torchtitan_rl.backends.titan.trainer import PolicyTrainer
from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.launch.interfaces import listen_privately
from torchtitan_rl.observability.trace import Tracer, host_label
from torchtitan_rl.training.batch import StepOutput, TrainingBatch
from torchtitan_rl.weights.config import Transport
from torchtitan_rl.weights.handle import SharedMemoryHandle, WeightHandle
from torchtitan_rl.weights.image import TensorPart, whole_parts
from torchtitan_rl.weights.remote import PartPublisher
from torchtitan_rl.weights.shm import SharedMemoryPublisher


class TrainerRank:
    """Made and called in one thread of its process, on all ranks together."""

    def __init__(self, spec: TrainerSpec, rank: int, transport: Transport) -> None:
        listen_privately()
        sys.path += [folder for folder in spec.python_path if folder not in sys.path]
        self._tracer = Tracer(spec.trace_dir, f"trainer rank {rank}", host=host_label())
        with self._tracer.span("start"):
            self._trainer = PolicyTrainer(
                spec.checkpoint,
                spec.trainer,
                seed=spec.seed,
                max_steps=spec.num_steps,
                dtype=spec.dtype,
            )
            self._shared = _shared_publisher(spec, transport) if rank == 0 else None
            self._joint = JointPublisher(self._shared) if transport.shares_memory else None
            self._remote = _remote_publisher(spec, rank) if transport.reaches_others else None

    def train_step(self, batch: TrainingBatch) -> StepOutput:
        with self._tracer.span("optimizer step", tokens=batch.num_tokens):
            return self._trainer.train_step(batch)

    def publish(self, keep: frozenset[int]) -> WeightHandle | None:
        """Collective; the handle on rank 0, None elsewhere."""
        version = self._trainer.version
        with self._tracer.span("publish", version=version):
            parts = self._trainer.hf_parts()
            tensors: dict[str, torch.Tensor] = {}
            if parts is None:
                with self._tracer.span("gather weights", version=version):
                    tensors = self._trainer.hf_state_dict()
            with self._tracer.span("write weights", version=version):
                shared, refusal = None, None
                try:
                    shared = self._share(version, parts, tensors, keep)
                except Exception as error:  # of rank 0; the others are in the next collective
                    refusal = error
                handle: WeightHandle | None = shared
                if self._remote is not None:
                    offered = whole_parts(tensors) if parts is None else parts
                    handle = self._remote.publish(version, offered, keep=keep, shared=shared)
                if refusal is not None:
                    raise refusal
                return handle

    def _share(
        self,
        version: int,
        parts: Mapping[str, TensorPart] | None,
        tensors: Mapping[str, torch.Tensor],
        keep: frozenset[int],
    ) -> SharedMemoryHandle | None:
        """Write into the memory of this host, if replicas are here; without ``parts`` rank 0 alone
        does. Raises on rank 0 only."""
        if parts is not None:
            joint = self._joint
            return None if joint is None else joint.publish(version, parts, keep=keep)
        shared = self._shared
        return None if shared is None else shared.publish(version, tensors, keep=keep)

    def save_checkpoint(self, path: Path, attachments: Mapping[str, bytes], version: int) -> None:
        """Collective; returns when everything is copied.

        Raises:
            CheckpointError: the weights are not those of ``version``, which ``attachments`` belong
                to.
        """
        if self._trainer.version != version:
            raise CheckpointError(
                f"{path} is not written: the trainer holds version {self._trainer.version} and the "
                f"run is at version {version}; a step ended after its deadline"
            )
        with self._tracer.span("stage checkpoint"):
            self._trainer.save_checkpoint(path, attachments)

    def finish_checkpoint(self) -> None:
        """Called in another thread, while other methods may run."""
        with self._tracer.span("write checkpoint", track="checkpoint"):
            self._trainer.finish_checkpoint()

    def load_checkpoint(self, path: Path) -> None:
        with self._tracer.span("load checkpoint"):
            self._trainer.load_checkpoint(path)

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
        for publisher in (self._shared, self._remote):
            if publisher is not None:
                publisher.close()
        self._trainer.close()
        self._tracer.close()


def _shared_publisher(spec: TrainerSpec, transport: Transport) -> SharedMemoryPublisher | None:
    return (
        SharedMemoryPublisher(spec.run_dir.name, spec.run_dir) if transport.shares_memory else None
    )


def _remote_publisher(spec: TrainerSpec, rank: int) -> RemotePublisher:
    from torchtitan_rl.backends.monarch.rdma import RdmaOffers

    return RemotePublisher(PartPublisher(RdmaOffers(), owner=f"trainer rank {rank}"))
