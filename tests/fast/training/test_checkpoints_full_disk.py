"""Checkpoints when a file operation fails, or when the process is killed at one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fast.training.test_checkpoints import names, write
from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.training import checkpoints
from torchtitan_rl.training.checkpoint_files import MARKER, temporary_path
from torchtitan_rl.training.checkpoints import CheckpointDirectory, NewestCheckpoint


class Disk:
    """Counts file operations; from number ``failing`` on, ``times`` of them raise ``error``."""

    def __init__(self, failing: int, times: int, error: BaseException) -> None:
        self._failing = failing
        self._times = times
        self._error = error
        self.operations = 0

    def use(self) -> None:
        self.operations += 1
        if self._failing <= self.operations < self._failing + self._times:
            raise self._error

    def guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            self.use()
            return function(*arguments, **options)

        return guarded


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def failing(operation: int, times: int = 1, error: BaseException = FULL) -> Iterator[Disk]:
    disk = Disk(operation, times, error)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "open", "rename"):
            patch.setattr(Path, name, disk.guard(getattr(Path, name)))
        for name in ("fsync", "open"):
            patch.setattr(os, name, disk.guard(getattr(os, name)))
        yield disk


def read(path: Path) -> bytes:
    return (path / "data").read_bytes()


@pytest.mark.parametrize("is_again", [False, True])
def test_a_write_that_fails_at_any_operation_leaves_no_trace_and_can_be_done_again(
    tmp_path: Path, is_again: bool
) -> None:
    """For a new step, and for one that already has a checkpoint."""
    operation = 0
    while True:
        operation += 1
        directory = CheckpointDirectory(tmp_path / str(operation))
        write(directory.path(1), b"old")
        step = 1 if is_again else 2
        try:
            with failing(operation):
                write(directory.path(step), b"new")
        except OSError:
            assert names(directory.root) == ["step-000001"]
            assert read(directory.path(1)) == b"old"
            assert CheckpointDirectory(directory.root).choose(
                lambda _: None, checksums=True
            ) == NewestCheckpoint(path=directory.path(1), step=1)
            write(directory.path(step), b"again")
            assert read(directory.path(step)) == b"again"
            assert directory.choose(lambda _: None, checksums=True).step == step
        else:
            break
    assert operation > 15


@pytest.mark.parametrize("is_again", [False, True])
def test_a_disk_that_stays_full_leaves_a_checkpoint_that_the_next_start_resumes_from(
    tmp_path: Path, is_again: bool
) -> None:
    """Nothing can be undone either; at the next start the disk has room."""
    for operation in range(1, 16):
        directory = CheckpointDirectory(tmp_path / str(operation))
        write(directory.path(1), b"old")
        with failing(operation, times=1000), pytest.raises(OSError, match="No space left"):
            write(directory.path(1 if is_again else 2), b"new")
        found = CheckpointDirectory(directory.root).choose(lambda _: None, checksums=True)
        assert found.path is not None
        assert read(found.path) in (b"old", b"new")
        assert names(directory.root) == [found.path.name] or not is_again
        write(directory.path(3), b"later")
        assert directory.choose(lambda _: None, checksums=True).step == 3


@pytest.mark.parametrize("is_again", [False, True])
def test_a_writer_that_is_killed_at_any_operation_leaves_a_checkpoint_to_resume_from(
    tmp_path: Path, is_again: bool
) -> None:
    operation, was_killed, contents = 0, True, set()
    while was_killed:
        operation += 1
        directory = CheckpointDirectory(tmp_path / str(operation))
        write(directory.path(1), b"old")
        try:
            with failing(operation, error=KeyboardInterrupt()):
                write(directory.path(1 if is_again else 2), b"new")
        except KeyboardInterrupt:
            found = CheckpointDirectory(directory.root).choose(lambda _: None, checksums=True)
            assert found.path is not None
            assert found.passed_over == ()
            assert set(names(directory.root)) == {"step-000001", found.path.name}
            contents.add(read(found.path))
        else:
            was_killed = False
    assert operation > 15
    assert contents == {b"old", b"new"}


def test_a_checkpoint_that_is_half_removed_is_not_taken_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (1, 2):
        write(directory.path(step), b"data")

    def half(path: Path, *, ignore_errors: bool = False) -> None:
        (path / "data").unlink(missing_ok=True)
        if not ignore_errors:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.shutil, "rmtree", half)
        with pytest.raises(CheckpointError, match=r"step-000001.*Input/output error"):
            directory.prune(keep=1)
    found = directory.choose(lambda _: None, checksums=True)
    assert (found.step, found.passed_over) == (2, ())
    assert names(tmp_path) == ["step-000002"]


@pytest.mark.parametrize(("number", "file"), [(errno.EIO, "data"), (errno.EACCES, MARKER)])
def test_a_newest_checkpoint_that_cannot_be_read_is_not_taken_for_a_torn_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, number: int
) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (1, 2):
        write(directory.path(step), b"data")
    temporary_path(directory.path(3)).mkdir()
    before = names(tmp_path)
    opened = Path.open

    def broken(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == directory.path(2) / file:
            raise OSError(number, os.strerror(number))
        return opened(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", broken)
        with pytest.raises(CheckpointError, match=os.strerror(number)) as refused:
            directory.choose(lambda _: None, checksums=True)
    assert "step-000002 cannot be read" in str(refused.value)
    assert names(tmp_path) == before
    assert directory.choose(lambda _: None, checksums=True).step == 2
