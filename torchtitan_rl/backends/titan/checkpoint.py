"""The trainer's state on disk: sharded tensors by torch's distributed checkpoint, the rest beside.

A checkpoint holds model and optimizer (any layout can load what another wrote), the random state of
each rank, attachments of the caller's, and the marker with version and the caller's document.

Writing goes on in a thread of each rank while training does. Invariants: what is written is what
was there when `CheckpointWriter.save` was called; the threads talk over a process group of their
own, in which nothing else is ever sent; all ranks of a checkpoint succeed or fail together.
"""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from torchtitan_rl.backends.titan.checkpoint_pickles import SafeLoadPlanner, check_metadata
from torchtitan_rl.backends.titan.optim import PolicyOptimizer
from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.training.checkpoint_files import (
    FileRecord,
    check_contents,
    check_sizes,
    discard,
    fingerprint,
    list_files,
    publish,
    read_document,
    recorded_files,
    seal,
    temporary_path,
    write_attachments,
    write_file,
)


class CheckpointWriter:
    """One on each trainer rank; making one is collective, and so are `save` and `finish`.

    Args:
        timeout: of a wait of one rank's writer for another's.
    """

    def __init__(self, *, timeout: timedelta) -> None:
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
        extra: Mapping[str, Any],
        attachments: Mapping[str, bytes],
    ) -> None:
        """Copy everything to CPU memory, return, and go on to write; ``path`` appears when all is
        in it. Waits for a checkpoint that is still being written. Attachments are rank 0's.

        Raises:
            CheckpointError: ``path`` cannot be written to, or that earlier one failed and `finish`
                has not said so yet.
        """
        self.finish()
        temporary = temporary_path(path)
        random = _to_bytes(_random_state())
        document = {"version": version, "ranks": dist.get_world_size(), "extra": extra}
        failure: str | None = None
        if dist.get_rank() == 0:
            try:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            except OSError as error:
                failure = _cause(error)
        self._agree(path, failure)  # and nobody writes into what rank 0 clears
        # Returns when the tensors are copied (all options of its stager are off).
        tensors = async_save(
            _state(model, optimizer), checkpoint_id=temporary, process_group=self._group
        )
        assert isinstance(tensors, Future)
        with self._lock:
            self._pending = self._thread.submit(
                self._write, path, tensors, random, attachments, document
            )

    def finish(self) -> None:
        """Return when the last saved checkpoint is on disk under its name; any thread may wait.

        Raises:
            CheckpointError: it could not be written. Said once.
        """
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
        """Wait for what is being written; the writer is of no use afterwards.

        Raises:
            CheckpointError: as `finish`.
        """
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
        """In the writer's thread: steps that all ranks take, or give up, together. What is given
        up leaves nothing behind."""
        try:
            self._write_together(path, tensors, random, attachments, document)
        except CheckpointError:  # all ranks have come so far, and none writes any more
            if dist.get_rank() == 0:
                discard(path)
            raise

    def _write_together(
        self,
        path: Path,
        tensors: Future[Any],
        random: bytes,
        attachments: Mapping[str, bytes],
        document: dict[str, Any],
    ) -> None:
        temporary, rank = temporary_path(path), dist.get_rank()
        failure: str | None = None
        try:
            tensors.result()
            write_file(temporary / f"random-{rank}.pt", random)
            write_attachments(temporary, attachments)
        except (CheckpointException, CheckpointError, OSError, RuntimeError) as error:
            failure = _cause(error)
        self._agree(path, failure)

        files: dict[str, FileRecord] = {}
        try:
            files = self._fingerprints(temporary)
        except OSError as error:
            failure = _cause(error)
        self._agree(path, failure)

        gathered: list[dict[str, FileRecord]] = [{}] * dist.get_world_size()
        dist.all_gather_object(gathered, files, group=self._group)
        try:
            if rank == 0:
                seal(temporary, document, {k: v for part in gathered for k, v in part.items()})
                publish(path)
        except (OSError, TypeError, ValueError) as error:  # a document that is not JSON-able
            failure = _cause(error)
        self._agree(path, failure)

    def _fingerprints(self, folder: Path) -> dict[str, FileRecord]:
        """Of this rank's share of the files."""
        return {name: fingerprint(folder / name) for name in _share(list_files(folder))}

    def _agree(self, path: Path, failure: str | None) -> None:
        """Raises on all ranks if one failed."""
        failures: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure, group=self._group)
        _refuse(f"checkpoint {path} was not written", failures)


def load_state(path: Path, model: Any, optimizer: PolicyOptimizer) -> tuple[int, dict[str, Any]]:
    """Collective. Returns (version, extra).

    Random states are restored only by as many ranks as wrote them.

    Raises:
        CheckpointError: ``path`` is torn, damaged or more than data, and nothing was changed; or it
            is one of another model, and the trainer is of no use any more.
    """
    failure: str | None = None
    try:
        check_sizes(path)
        check_contents(path, _share(sorted(recorded_files(path))))
        check_metadata(path)
    except CheckpointError as error:
        failure = str(error)
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    _refuse("cannot go on from a checkpoint", failures)
    document = read_document(path)
    state = _state(model, optimizer)
    try:
        load(state, checkpoint_id=path, planner=SafeLoadPlanner())
    except CheckpointException as error:  # no subclass of Exception
        raise CheckpointError(f"checkpoint {path} does not fit: {_cause(error)}") from error
    model.load_state_dict(state["model"])
    optimizer.container.load_state_dict(state["optimizer"])
    optimizer.restore_schedule(document["version"])
    if document["ranks"] == dist.get_world_size():
        random = torch.load(path / f"random-{dist.get_rank()}.pt", weights_only=True)
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"])
    return document["version"], document["extra"]


def _state(model: Any, optimizer: PolicyOptimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.container.state_dict()}


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _to_bytes(state: dict[str, torch.Tensor]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _share(names: list[str]) -> list[str]:
    """Each rank reads some of the files."""
    return names[dist.get_rank() :: dist.get_world_size()]


def _refuse(what: str, failures: list[str | None]) -> None:
    causes = dict.fromkeys(failure for failure in failures if failure is not None)
    if causes:
        raise CheckpointError(f"{what}: " + "; ".join(causes))


def _cause(error: BaseException) -> str:
    if isinstance(error, CheckpointException):  # of all ranks, with their traces
        return "; ".join(
            f"rank {rank}: {type(cause).__name__}: {cause}"
            for rank, (cause, _) in sorted(error.failures.items())
        )
    return f"{type(error).__name__}: {error}"
