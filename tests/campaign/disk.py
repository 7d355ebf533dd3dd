"""The disk of a machine: each write and each change of a name asks the machine first, which may
have it fail, tear it or end the process there."""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from tests.campaign.machine import CURRENT, Machine
from torchtitan_rl import files
from torchtitan_rl.orchestration import journal
from torchtitan_rl.training import checkpoint_files

_machine: Machine | None = None
_is_hooked = False
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class SimFile(FileIO):
    """A file of some ``kind``; a write that fails, or is torn, has written its first half."""

    def __init__(self, kind: str, path: Path, mode: str) -> None:
        super().__init__(path, mode)
        self.kind = kind

    def write(self, data: Any) -> int:
        machine = _current()
        action = machine.at_disk(self.kind) if machine is not None else None
        if action is None or machine is None:
            return super().write(data)
        super().write(bytes(data)[: len(data) // 2])
        if action in ("torn", "kill"):
            machine.kill()
        raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def disk_of(machine: Machine) -> Iterator[None]:
    """What the package writes goes to this disk while the block is open, or to that of the process
    that writes it."""
    global _machine, _is_hooked
    if not _is_hooked:
        sys.addaudithook(_on_event)
        _is_hooked = True
    replaced: list[tuple[Any, str, Any]] = [
        (journal.sqlite3, "connect", _connect),
        (files, "FileIO", _rows_file),
        (checkpoint_files, "write_file", _write_file),
        (checkpoint_files, "sync_directory", _no_sync),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    for module, name, ours in replaced:
        setattr(module, name, ours)
    _machine = machine
    try:
        yield
    finally:
        _machine = None
        for module, name, theirs in before:
            setattr(module, name, theirs)


def _current() -> Machine | None:
    return None if _machine is None else CURRENT.get(_machine)


class SimConnection(sqlite3.Connection):
    """Of a journal: each INSERT asks the machine; a kill leaves its transaction open."""

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        action, machine = None, _current()
        if sql.startswith("INSERT") and machine is not None:
            action = machine.at_disk("journal")
        if action == "no_space":
            raise sqlite3.OperationalError("database or disk is full")
        done = super().execute(sql, *parameters)
        if action is not None and machine is not None:
            machine.kill()
        return done


_connect_to_file = sqlite3.connect


def _connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
    return _connect_to_file(*arguments, **options, factory=SimConnection)


def _rows_file(path: Path, mode: str) -> SimFile:
    return SimFile("rows", path, mode)


def _write_file(path: Path, content: bytes) -> None:
    with SimFile("checkpoint", path, "w") as file:
        file.write(content)


def _no_sync(directory: Path) -> None:
    """Memory needs none."""


def _on_event(event: str, args: tuple[Any, ...]) -> None:
    """Python tells of every change of a name before it is made."""
    machine = _current()
    if machine is None or machine.is_dead:
        return
    match event:
        case "open":
            is_change = bool(args[2] & _WRITES) and _is_on(machine, args[0])
        case "os.rename" | "os.mkdir":
            is_change = _is_on(machine, args[0])
        case "os.remove" | "os.rmdir":
            is_change = True
        case _:
            return
    if is_change:
        action = machine.at_disk(event)
        if action in ("torn", "kill"):
            machine.kill()
        if action == "no_space" and event in ("open", "os.mkdir"):
            raise OSError(errno.ENOSPC, "No space left on device")


def _is_on(machine: Machine, path: Any) -> bool:
    return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(str(machine.root))
