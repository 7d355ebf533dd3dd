"""One checkpoint's folder: data files, and a marker written last that vouches for them.

The marker is a JSON document with the size and CRC-32 of every file and, in its last field, of
itself, so that a checkpoint that was cut short or damaged is known as such. Files that it does not
list may lie beside and do not count.

Invariants: a marker is on disk only after everything that it lists; a folder has its final name
only once its marker is on disk; where a step of writing fails and `discard` is called, what was
there before is there, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl.errors import CheckpointError

MARKER = "trainer.json"
TEMPORARY_SUFFIX = ".writing"
REPLACED_SUFFIX = ".replaced"
_ATTACHMENTS = "attachments"
_FILES = "files"
_CHECKSUM = "crc32"  # of the marker's text without this field, which older versions do not write
_CHECKSUM_FIELD = re.compile(rb', "%s": (\d+)\}\s*$' % _CHECKSUM.encode())
_CHUNK_BYTES = 4 << 20


class CheckpointUnreadableError(CheckpointError):
    """The system could not read a file of a checkpoint (EIO, EACCES): whether it is whole is not
    known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """What a file must be to be whole."""

    num_bytes: int
    crc32: int


def temporary_path(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def write_file(path: Path, content: bytes) -> None:
    """Write and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_attachments(folder: Path, attachments: Mapping[str, bytes]) -> None:
    """Put bytes of the caller's, by name, into a checkpoint that is being written.

    Raises:
        CheckpointError: a name that is more than the name of a file.
    """
    if not attachments:
        return
    (folder / _ATTACHMENTS).mkdir()
    for name, content in attachments.items():
        if name in ("", ".", "..") or Path(name).name != name:
            raise CheckpointError(f"attachment {name!r}: use a plain file name")
        write_file(folder / _ATTACHMENTS / name, content)


def list_files(folder: Path) -> list[str]:
    """All files but the marker, as sorted paths relative to ``folder``."""
    return sorted(
        name
        for path in folder.rglob("*")
        if path.is_file() and (name := path.relative_to(folder).as_posix()) != MARKER
    )


def fingerprint(path: Path) -> FileRecord:
    """Size and checksum of a file as it is now; memory stays small."""
    num_bytes = crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            num_bytes += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return FileRecord(num_bytes=num_bytes, crc32=crc32)


def seal(folder: Path, document: Mapping[str, Any], files: Mapping[str, FileRecord]) -> None:
    """Write the marker: ``document`` and the record of each file. Their data must be on disk."""
    records = {name: asdict(record) for name, record in files.items()}
    for directory in {folder, *((folder / name).parent for name in files)}:
        _sync_directory(directory)  # the names of the files, before the marker's
    text = json.dumps({**document, _FILES: records}).encode()
    checksum = b', "%s": %d}\n' % (_CHECKSUM.encode(), zlib.crc32(text))
    write_file(folder / MARKER, text.removesuffix(b"}") + checksum)
    _sync_directory(folder)


def publish(path: Path) -> None:
    """Give the sealed `temporary_path` its name, in place of what may be there.

    Raises:
        OSError: it cannot; what was there is there again.
    """
    temporary, replaced = temporary_path(path), path.with_name(path.name + REPLACED_SUFFIX)
    shutil.rmtree(replaced, ignore_errors=True)
    is_replacing = path.exists()
    if is_replacing:
        path.rename(replaced)
    try:
        temporary.rename(path)
        _sync_directory(path.parent)
    except OSError:
        # What cannot be undone either is dealt with by the next start, which finds the rest.
        with contextlib.suppress(OSError):
            path.rename(temporary)
        if is_replacing:
            with contextlib.suppress(OSError):
                replaced.rename(path)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def discard(path: Path) -> None:
    """Give up a checkpoint that could not be written: its room is free again. What cannot be
    removed is not found as a checkpoint, and goes at the next occasion."""
    shutil.rmtree(temporary_path(path), ignore_errors=True)


def read_document(folder: Path) -> dict[str, Any]:
    """What `seal` was given.

    Raises:
        CheckpointError: there is no whole marker, or it is damaged.
    """
    return _read_marker(folder)[0]


def recorded_files(folder: Path) -> dict[str, FileRecord]:
    """What the marker lists.

    Raises:
        CheckpointError: there is no whole marker.
    """
    return _read_marker(folder)[1]


def check_sizes(folder: Path) -> None:
    """Cheap: asks the file system, reads no data.

    Raises:
        CheckpointError: a file is not there or not of its size, or there is no whole marker.
        CheckpointUnreadableError: the system cannot tell.
    """
    for name, record in recorded_files(folder).items():
        found = _size(folder, name)
        if found != record.num_bytes:
            raise CheckpointError(
                f"checkpoint {folder} is not complete: {name} "
                + ("is not there" if found is None else f"has {found} of {record.num_bytes} bytes")
            )


def check_contents(folder: Path, names: Iterable[str] | None = None) -> None:
    """Read ``names`` (default: all that the marker lists).

    Raises:
        CheckpointError: one of them is not what was written.
        CheckpointUnreadableError: one of them cannot be read.
    """
    check_sizes(folder)
    records = recorded_files(folder)
    for name in records if names is None else names:
        try:
            found = fingerprint(folder / name)
        except OSError as error:
            raise _unreadable(folder, name, error) from error
        if found != records[name]:
            raise CheckpointError(f"checkpoint {folder} is damaged: {name} has another checksum")


def load_attachment(folder: Path, name: str) -> bytes:
    """What the checkpoint was saved with under ``name``.

    Raises:
        CheckpointError: there is none, or it is damaged.
        CheckpointUnreadableError: it cannot be read.
    """
    key = f"{_ATTACHMENTS}/{name}"
    record = recorded_files(folder).get(key)
    if record is None or _size(folder, key) is None:
        raise CheckpointError(f"checkpoint {folder} has no attachment {name}")
    try:
        content = (folder / key).read_bytes()
    except OSError as error:
        raise _unreadable(folder, key, error) from error
    if FileRecord(num_bytes=len(content), crc32=zlib.crc32(content)) != record:
        raise CheckpointError(f"checkpoint {folder} is damaged: attachment {name}")
    return content


def _read_marker(folder: Path) -> tuple[dict[str, Any], dict[str, FileRecord]]:
    try:
        content = (folder / MARKER).read_bytes()
        document: dict[str, Any] = json.loads(content)
        if _CHECKSUM in document and not _is_intact(content):
            raise CheckpointError(f"checkpoint {folder} is damaged: {MARKER} has another checksum")
        document.pop(_CHECKSUM, None)
        records = document.pop(_FILES)
        return document, {name: FileRecord(**record) for name, record in records.items()}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"checkpoint {folder} is not complete: no {MARKER}") from error
    except OSError as error:
        raise _unreadable(folder, MARKER, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder}: {MARKER} is not one of ours") from error


def _is_intact(marker: bytes) -> bool:
    """Does its text have the checksum in it?"""
    field = _CHECKSUM_FIELD.search(marker)
    return field is not None and zlib.crc32(marker[: field.start()] + b"}") == int(field[1])


def _size(folder: Path, name: str) -> int | None:
    """In bytes; None where there is no such file."""
    try:
        found = (folder / name).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _unreadable(folder, name, error) from error
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _unreadable(folder: Path, name: str, error: OSError) -> CheckpointUnreadableError:
    return CheckpointUnreadableError(f"checkpoint {folder} cannot be read: {name}: {error}")


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
