"""Runs in a trainer process: the policy trainer, and the publishers of its weights.

All ranks publish together. Each rank copies its shards; nothing is gathered. On the trainer's host
the ranks write into the same shared memory: rank 0 first allocates it, and makes the version
visible after all ranks have written. To other hosts, each rank offers its own parts; only the
references to these parts are gathered on rank 0.

Invariant: if a rank cannot write or offer a version, the version never becomes visible, and every
rank returns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from torchtitan_rl.backends.specs import TrainerSpec
from torchtitan_rl.backends.titan.profiler import StepProfiler
from torchtitan_rl.backends.titan.setup import check_device
from torchtitan_rl.backends.titan.trainer import PolicyTrainer
from torchtitan_rl.errors import CheckpointError, WeightSyncError
from torchtitan_rl.launch.interfaces import listen_privately
from torchtitan_rl.observability.trace import Tracer, host_label
from torchtitan_rl.training.batch import (
    PreferenceLoss,
    StepLoss,
    StepOutput,
    SupervisedLoss,
    TrainingBatch,
)
from torchtitan_rl.weights.config import Transport
from torchtitan_rl.weights.distribution import (
    RemoteMemoryHandle,
    RemoteSource,
    SharedMemoryHandle,
    WeightHandle,
)
from torchtitan_rl.weights.image import (
    TensorPart,
    plan_image,
    whole_parts,
    write_header,
    write_parts,
)
from torchtitan_rl.weights.pinning import HostPins
from torchtitan_rl.weights.remote import PartPublisher
from torchtitan_rl.weights.shm import SegmentWriter, SharedMemoryPublisher


class TrainerRank:
    """One rank's trainer and publishers. Created and called in one thread of its process, on all
    ranks together."""

    def __init__(self, spec: TrainerSpec, rank: int, transport: Transport) -> None:
        listen_privately()
        sys.path += [folder for folder in spec.python_path if folder not in sys.path]
        check_device(spec.device)
        self._tracer = Tracer(spec.trace_dir, f"trainer rank {rank}", host=host_label())
        self._profiler = StepProfiler(spec.profile, spec.run_dir / "profile", rank)
        with self._tracer.span("start"):
            self._trainer = PolicyTrainer(
                spec.checkpoint,
                spec.trainer,
                seed=spec.seed,
                max_steps=spec.num_steps,
                dtype=spec.dtype,
                lora=spec.lora,
                teachers=spec.teachers,
            )
            self._pins = HostPins(self._trainer.cuda_device)
            self._shared: SharedMemoryPublisher | None = None
            self._joint: JointPublisher | None = None
            self._remote: PartPublisher | None = None
            if transport is not Transport.RDMA:
                if rank == 0:
                    self._shared = SharedMemoryPublisher(
                        spec.run_dir.name, spec.run_dir, pins=self._pins
                    )
                self._joint = JointPublisher(self._shared, self._pins)
            if transport is not Transport.SHARED_MEMORY:
                from torchtitan_rl.backends.monarch.weight_replicator import RdmaOffers

                owner = f"trainer rank {rank}"
                self._remote = PartPublisher(RdmaOffers(), owner=owner, pins=self._pins)

    def train_step(
        self, batch: TrainingBatch, loss: StepLoss | None, examples: TrainingBatch | None
    ) -> StepOutput:
        with (
            self._tracer.span("optimizer step", tokens=batch.num_tokens),
            self._profiler.step(self._trainer.version + 1),
        ):
            match loss:
                case SupervisedLoss():
                    return self._trainer.supervised_step(batch)
                case PreferenceLoss():
                    return self._trainer.preference_step(batch, loss)
                case _:
                    return self._trainer.train_step(batch, loss, examples)

    def logprobs(self, batch: TrainingBatch) -> npt.NDArray[np.float32]:
        with self._tracer.span("logprobs", tokens=batch.num_tokens):
            return self._trainer.logprobs(batch)

    def publish(self, keep: frozenset[int]) -> WeightHandle | None:
        """Publish the current weights. Collective. Returns the handle on rank 0."""
        version = self._trainer.version
        with self._tracer.span("publish", version=version):
            parts = self._trainer.hf_parts()
            tensors: dict[str, torch.Tensor] = {}
            if parts is None:
                with self._tracer.span("gather weights", version=version):
                    tensors = self._trainer.hf_state_dict()
            with self._tracer.span("write weights", version=version):
                shared: SharedMemoryHandle | None = None
                refusal: Exception | None = None
                try:
                    if parts is not None and self._joint is not None:
                        shared = self._joint.publish(version, parts, keep=keep)
                    elif parts is None and self._shared is not None:  # only rank 0 writes
                        shared = self._shared.publish(version, tensors, keep=keep)
                except Exception as error:  # only on rank 0; others are in the next collective
                    refusal = error
                handle: WeightHandle | None = shared
                if self._remote is not None:
                    offered = whole_parts(tensors) if parts is None else parts
                    handle = publish_parts(self._remote, version, offered, keep, shared)
                if refusal is not None:
                    raise refusal
                return handle

    def save_checkpoint(self, path: Path, attachments: Mapping[str, bytes], version: int) -> None:
        """Start saving a checkpoint. Collective. Returns when everything is copied. Raises
        CheckpointError: the weights do not have ``version``, to which ``attachments`` belong."""
        if self._trainer.version != version:
            raise CheckpointError(
                f"{path} is not written: the trainer holds version {self._trainer.version} and the "
                f"run is at version {version}; a step ended after its deadline"
            )
        with self._tracer.span("stage checkpoint"):
            self._trainer.save_checkpoint(path, attachments)

    def finish_checkpoint(self) -> None:
        """Wait until the checkpoint is written; in a thread of its own."""
        with self._tracer.span("write checkpoint", track="checkpoint"):
            self._trainer.finish_checkpoint()

    def pass_on(self, method: str, *arguments: Any) -> None:
        """Call a method of the trainer, which is a span of this name in the trace."""
        with self._tracer.span(method.replace("_", " ")):
            getattr(self._trainer, method)(*arguments)

    def close(self) -> None:
        for publisher in (self._shared, self._remote):
            if publisher is not None:
                publisher.close()
        self._pins.close()
        self._trainer.close()
        self._tracer.close()


_PATH_BYTES = 4096  # PATH_MAX of Linux


class JointPublisher:
    """Publishes weights of all ranks in shared memory. Each rank has one; ``publisher`` is None
    except on rank 0."""

    def __init__(
        self, publisher: SharedMemoryPublisher | None, pins: HostPins | None = None
    ) -> None:
        self._publisher = publisher
        self._writer = SegmentWriter(pins)

    def publish(
        self, version: int, parts: Mapping[str, TensorPart], *, keep: frozenset[int]
    ) -> SharedMemoryHandle | None:
        """Like `SharedMemoryPublisher.publish`, on all ranks together. Returns None except on rank
        0. Raises WeightSyncError: there is no room, or a rank could not write. Raised only on rank
        0."""
        layout = plan_image({name: part.whole() for name, part in parts.items()}, version)
        segment, refusal = None, None
        if self._publisher is not None:
            try:
                segment = self._publisher.begin(layout, keep)
            except Exception as error:  # raised after all ranks know of it
                refusal = error
        path = _path_of_first_rank(segment.path if segment is not None else None)
        if path is None:
            if refusal is not None:
                raise refusal
            return None
        failure: str | None = None
        try:
            if segment is not None:
                write_header(layout, segment.image)
            image = self._writer.image(path) if segment is None else segment.image
            write_parts(layout, parts, image)
        except Exception as error:  # the other ranks wait for the result
            failure = repr(error)
        errors = _errors_of_all_ranks(failure)
        if self._publisher is None or segment is None:
            return None
        if errors:
            segment.remove()
            raise WeightSyncError(f"version {version} cannot be written: {'; '.join(errors)}")
        return self._publisher.finish(layout, segment)


# Both functions run at each publishing. They send tensors, because `broadcast_object_list` and
# `all_gather_object` first send the sizes of the pickles, which doubles the time.
def _path_of_first_rank(path: Path | None) -> Path | None:
    if dist.get_world_size() == 1:
        return path
    encoded = b"" if path is None else os.fsencode(path)
    sent = torch.frombuffer(bytearray(encoded.ljust(_PATH_BYTES, b"\0")), dtype=torch.uint8)
    dist.broadcast(sent, src=0)
    received = bytes(sent.numpy()).rstrip(b"\0")
    return Path(os.fsdecode(received)) if received else None


def _errors_of_all_ranks(message: str | None) -> list[str]:
    are_any = torch.tensor([message is not None], dtype=torch.int32)
    if dist.get_world_size() > 1:
        dist.all_reduce(are_any, dist.ReduceOp.MAX)
    if not are_any.item():
        return []
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, message)
    return [f"rank {rank}: {why}" for rank, why in enumerate(errors) if why]


def publish_parts(
    publisher: PartPublisher,
    version: int,
    parts: Mapping[str, TensorPart],
    keep: frozenset[int],
    shared: SharedMemoryHandle | None,
) -> RemoteMemoryHandle | None:
    """Offer a version of all ranks to other hosts, each by its ``publisher``. Collective. Returns
    the handle on rank 0, None on other ranks.

    Args:
        parts: this rank's parts; those of rank 0 include all tensors' names.
        shared: the same version in shared memory; only on rank 0, and only if it exists.

    Raises:
        WeightSyncError: a rank could not offer its parts. Raised only on rank 0.
    """
    is_first = dist.get_rank() == 0
    answers: list[Any] | None = [None] * dist.get_world_size() if is_first else None
    own: RemoteSource | str | None
    try:
        own = publisher.publish(version, parts, keep=keep)
    except Exception as error:  # rank 0 waits for the answer
        own = repr(error)
    dist.gather_object(own, answers, dst=0)
    if answers is None:
        return None
    errors = [f"rank {rank}: {one}" for rank, one in enumerate(answers) if isinstance(one, str)]
    if errors:
        raise WeightSyncError(f"version {version} cannot be offered: {'; '.join(errors)}")
    return RemoteMemoryHandle(
        layout=plan_image({name: part.whole() for name, part in parts.items()}, version),
        sources=tuple(one for one in answers if isinstance(one, RemoteSource)),
        keep=keep,
        shared=shared,
    )
