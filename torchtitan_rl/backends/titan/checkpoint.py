"""The trainer's state on disk: tensors in torch's distributed checkpoint, and files of our own.

A checkpoint holds model and optimizer (readable by any parallel layout), each rank's random state,
the caller's attachments, and the marker with the version (see `training/checkpoint_files.py`). With
adapters it holds of the model only these, and the marker has their configuration.

A thread of each rank writes while training continues. Invariants:
- A checkpoint holds the state at the call of `CheckpointWriter.save`.
- The threads use their own process group, in which nothing else is sent.
- All ranks of a checkpoint succeed or fail together.

A checkpoint cannot execute code when it is loaded. torch stores metadata and values that are not
tensors as pickles, which could call any function. Both are first read by an unpickler that accepts
only a few names.
"""

from __future__ import annotations

import io
import pickle
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from torchtitan_rl.backends.titan.model import LORA_A, LORA_B
from torchtitan_rl.backends.titan.optim import PolicyOptimizer
from torchtitan_rl.config.lora import LoraConfig
from torchtitan_rl.errors import CheckpointError, one_line
from torchtitan_rl.files import write_file
from torchtitan_rl.training.checkpoint_files import (
    FileRecord,
    check_contents,
    discard,
    fingerprint,
    list_files,
    publish,
    read_document,
    read_marker,
    seal,
    temporary_path,
    write_attachments,
)

_T = TypeVar("_T")
_LORA = "lora"  # in the marker
_FULL_BYTES = 1 << 20  # a disk with less room is full


class CheckpointWriter:
    """Writes checkpoints, with the adapters of ``lora``, in the background. The creation of the
    ranks' writers, `save` and `finish` are collective. ``timeout``: how long their threads wait for
    others."""

    def __init__(self, *, timeout: timedelta, lora: LoraConfig) -> None:
        self._lora = lora
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._lock = threading.Lock()
        self._pending: Future[None] | None = None

    def save(
        self,
        path: Path,
        model: Any,
        optimizer: PolicyOptimizer,
        *,
        version: int,
        attachments: Mapping[str, bytes],
    ) -> None:
        """Copy the state to CPU memory and return; ``path`` appears after everything is written.
        First waits for a checkpoint that is still being written. Only rank 0 passes attachments.
        Raises CheckpointError: ``path`` cannot be written to, or the previous checkpoint failed."""
        self.finish()
        temporary, random = temporary_path(path), _random_state()

        def make_folder() -> None:
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)

        self._together(path, make_folder)  # no rank writes before the folder is empty
        # The call returns after the tensors are copied, because all options of its stager are off.
        tensors = async_save(
            _state(model, optimizer, self._lora), checkpoint_id=temporary, process_group=self._group
        )
        assert isinstance(tensors, Future)
        document: dict[str, Any] = {"version": version, "ranks": dist.get_world_size()}
        if self._lora.rank:
            document[_LORA] = asdict(self._lora)
        with self._lock:
            self._pending = self._thread.submit(
                self._write, path, tensors, random, attachments, document
            )

    def finish(self) -> None:
        """Wait until the last saved checkpoint is on disk. Any thread may call it. Raises
        CheckpointError: the checkpoint could not be written. This is raised only once."""
        pending = self._pending
        if pending is None:
            return
        try:
            pending.result()
        finally:
            with self._lock:
                if self._pending is pending:
                    self._pending = None

    def close(self) -> None:
        """Finish writing, for good. Raises CheckpointError: as `finish`."""
        self._thread.shutdown(wait=True)
        self.finish()

    def _write(
        self,
        path: Path,
        tensors: Future[Any],
        random: bytes,
        attachments: Mapping[str, bytes],
        document: dict[str, Any],
    ) -> None:
        """Write one checkpoint, in the writer's thread; remove it if that fails."""
        temporary, rank = temporary_path(path), dist.get_rank()

        def write() -> None:
            try:
                tensors.result()
            except CheckpointException as error:  # of a full disk, torch reports only a position
                if shutil.disk_usage(temporary).free < _FULL_BYTES:
                    raise CheckpointError(
                        f"no space left on the disk: {_message(error)}"
                    ) from error
                raise
            write_file(temporary / f"random-{rank}.pt", random)
            write_attachments(temporary, attachments)

        def fingerprints() -> dict[str, FileRecord]:
            return {name: fingerprint(temporary / name) for name in _share(list_files(temporary))}

        def complete() -> None:
            if rank == 0:
                seal(temporary, document, {k: v for part in parts for k, v in part.items()})
                publish(path)

        try:
            self._together(path, write)
            parts = self._together(path, fingerprints)
            self._together(path, complete)
        except CheckpointError:  # raised on all ranks together, so no rank is still writing
            if rank == 0:
                discard(path)
            raise

    def _together(self, path: Path, phase: Callable[[], _T]) -> list[_T]:
        return _together(phase, f"checkpoint {path} was not written", self._group)


def load_state(path: Path, model: Any, optimizer: PolicyOptimizer, lora: LoraConfig) -> int:
    """Read a checkpoint into model and optimizer, and return its version. Collective.

    Random states are restored only if the checkpoint was written by the same number of ranks.

    Raises:
        CheckpointError: ``path`` is incomplete, damaged or contains more than data (then nothing
            was changed), or belongs to another model (then the trainer cannot be used any more).
    """
    checked = _together(lambda: _check(path), "a checkpoint cannot be resumed from")
    document, saved = read_document(path), checkpoint_lora(path)
    if saved != lora:
        raise CheckpointError(f"checkpoint {path} was written with {saved}, not with {lora}")
    state = _state(model, optimizer, lora)
    try:
        load(state, checkpoint_id=path, planner=SafeLoadPlanner())
    except CheckpointException as error:  # no subclass of Exception
        raise CheckpointError(f"checkpoint {path} does not fit: {_message(error)}") from error
    model.load_state_dict(state["model"], strict=not lora.rank)
    optimizer.container.load_state_dict(state["optimizer"])
    optimizer.restore_schedule(document["version"])
    random = checked[dist.get_rank()]
    if random is not None:
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"])
    return int(document["version"])


def _check(path: Path) -> dict[str, torch.Tensor] | None:
    """Check this rank's share of the files. Return its random state, of the same number of
    ranks."""
    document, files = read_marker(path)
    check_contents(path, _share(sorted(files)))
    check_metadata(path)
    if document["ranks"] != dist.get_world_size():
        return None
    return torch.load(path / f"random-{dist.get_rank()}.pt", weights_only=True)


def checkpoint_lora(path: Path) -> LoraConfig:
    """Return the configuration of the adapters in a checkpoint; of rank 0 if it has all weights.
    Raises CheckpointError: the marker is damaged."""
    found = read_document(path).get(_LORA)
    if found is None:
        return LoraConfig()
    return LoraConfig(**found | {"target_modules": tuple(found["target_modules"])})


def _state(model: Any, optimizer: PolicyOptimizer, lora: LoraConfig) -> dict[str, Any]:
    if next(optimizer.tensors(), None) is None:
        # To make the state, torch takes a step without gradients and counts it. Otherwise AdamW's
        # first step would be corrected for bias as its second.
        optimizer.container.state_dict()
        optimizer.forget_steps()
    state = model.state_dict()
    if lora.rank:
        state = {n: one for n, one in state.items() if LORA_A in n or LORA_B in n}
    return {"model": state, "optimizer": optimizer.container.state_dict()}


def _random_state() -> bytes:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _share(names: list[str]) -> list[str]:
    return names[dist.get_rank() :: dist.get_world_size()]


def _together(
    phase: Callable[[], _T], what: str, group: dist.ProcessGroup | None = None
) -> list[_T]:
    """Run ``phase`` on every rank, and return the results of all ranks. Collective. If it fails on
    any, every rank raises a CheckpointError with ``what`` and the causes."""
    own: tuple[str | None, Any] = None, None
    try:
        own = None, phase()
    except (Exception, CheckpointException) as error:  # all types: the other ranks are waiting
        own = _message(error), None
    outcomes: list[tuple[str | None, Any]] = [own] * dist.get_world_size()
    dist.all_gather_object(outcomes, own, group=group)
    causes = dict.fromkeys(message for message, _ in outcomes if message is not None)
    if causes:
        raise CheckpointError(f"{what}: " + "; ".join(causes))
    return [result for _, result in outcomes]


def _message(error: BaseException) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, CheckpointException):  # holds the errors of all ranks, with traces
        return "; ".join(
            f"rank {rank}: {one_line(cause)}" for rank, (cause, _) in sorted(error.failures.items())
        )
    return one_line(error)


_METADATA = ".metadata"
_ALLOWED = {  # names by module
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device"),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath"),
}


def check_metadata(folder: Path) -> None:
    """Check that the metadata contains only names, sizes and locations of tensors. Raises
    CheckpointError: the metadata contains anything else, or cannot be read."""
    try:
        _MetadataReader(io.BytesIO((folder / _METADATA).read_bytes())).load()
    except Exception as error:  # arbitrary bytes can make an unpickler raise anything
        raise CheckpointError(
            f"checkpoint {folder}: {_METADATA} is refused: {one_line(error)}"
        ) from error


class SafeLoadPlanner(DefaultLoadPlanner):
    """Loads values that are not tensors only if `torch.load` accepts them as plain data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _MetadataReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name not in _ALLOWED.get(module, ()) and not is_dtype:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return super().find_class(module, name)
