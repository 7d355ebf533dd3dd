"""The folder of one checkpoint: data files, and a marker written last that lists them.

The marker is a JSON document with the size and CRC-32 of every file, and of itself, so that an
incomplete or damaged checkpoint is recognized. Files that it does not list are ignored.

Writing: create files in `temporary_path`, `seal` them with the marker, `publish` the folder under
its name; `discard` after an error. Invariants: a marker is on disk only after every file that it
lists. A folder has its final name only after its marker is on disk. After `discard` nothing of the
failed checkpoint is left on disk.

Functions that write raise OSError; functions that read raise `CheckpointError`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.files import parse_object, sync_directory, write_file

MARKER = "trainer.json"
TEMPORARY_SUFFIX = ".writing"
REPLACED_SUFFIX = ".replaced"
_ATTACHMENTS = "attachments"
_FILES = "files"
_CHECKSUM = "crc32"  # CRC-32 of the marker's text without this field
_CHECKSUM_FIELD = re.compile(rb', "%s": (\d+)\}\s*$' % _CHECKSUM.encode())
_CHUNK_BYTES = 4 << 20
_MISSING = (FileNotFoundError, NotADirectoryError)


class CheckpointUnreadableError(CheckpointError):
    """The operating system could not read a checkpoint (EIO, EACCES), which may be complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    num_bytes: int
    crc32: int


def temporary_path(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY_SUFFIX)


def write_attachments(folder: Path, attachments: Mapping[str, bytes]) -> None:
    """Add the caller's bytes, by name, to a checkpoint that is being written. Raises
    CheckpointError: a name is not a plain file name."""
    if not attachments:
        return
    (folder / _ATTACHMENTS).mkdir()
    for name, content in attachments.items():
        if name in ("", ".", "..") or Path(name).name != name:
            raise CheckpointError(f"attachment {name!r}: use a plain file name")
        write_file(folder / _ATTACHMENTS / name, content)


def list_files(folder: Path) -> list[str]:
    """All files except the marker, as sorted paths relative to ``folder``."""
    return sorted(
        name
        for path in folder.rglob("*")
        if path.is_file() and (name := path.relative_to(folder).as_posix()) != MARKER
    )


def fingerprint(path: Path) -> FileRecord:
    num_bytes = crc32 = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            num_bytes += len(chunk)
            crc32 = zlib.crc32(chunk, crc32)
    return FileRecord(num_bytes=num_bytes, crc32=crc32)


def seal(
    folder: Path, document: Mapping[str, Any], files: Mapping[str, FileRecord] | None = None
) -> None:
    """Write the marker with ``document`` and the list of ``files`` (default: all files in the
    folder). The caller must have synced the files' data to disk."""
    if files is None:
        files = {name: fingerprint(folder / name) for name in list_files(folder)}
    for directory in {folder, *((folder / name).parent for name in files)}:
        sync_directory(directory)  # names of the files, before the marker's
    records = {name: asdict(record) for name, record in files.items()}
    text = json.dumps({**document, _FILES: records}).encode()
    checksum = b', "%s": %d}\n' % (_CHECKSUM.encode(), zlib.crc32(text))
    write_file(folder / MARKER, text.removesuffix(b"}") + checksum)
    sync_directory(folder)


def publish(path: Path) -> None:
    """Rename the sealed `temporary_path` to ``path``, replacing an earlier checkpoint there. Raises
    OSError: renaming failed. The earlier checkpoint has been renamed back."""
    temporary, replaced = temporary_path(path), path.with_name(path.name + REPLACED_SUFFIX)
    shutil.rmtree(replaced, ignore_errors=True)
    is_replacing = path.exists()
    if is_replacing:
        path.rename(replaced)
    try:
        temporary.rename(path)
        sync_directory(path.parent)
    except OSError:
        # If undoing fails as well, the next start finds ``replaced`` and restores it.
        with contextlib.suppress(OSError):
            path.rename(temporary)
        if is_replacing:
            with contextlib.suppress(OSError):
                replaced.rename(path)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def discard(path: Path) -> None:
    """Remove the files of a checkpoint that failed. Files that cannot be removed now are never
    treated as a checkpoint; `CheckpointDirectory` removes them later."""
    shutil.rmtree(temporary_path(path), ignore_errors=True)


def read_document(folder: Path) -> dict[str, Any]:
    """Read the document that was given to `seal`. Raises CheckpointError: the marker is missing or
    damaged."""
    return read_marker(folder)[0]


def check_sizes(folder: Path) -> dict[str, FileRecord]:
    """Check that every listed file exists and has its size, without reading the files. Returns the
    list.

    Raises:
        CheckpointError: a file is missing or has another size, or the marker is missing or damaged.
        CheckpointUnreadableError: the operating system reports an error.
    """
    _, records = read_marker(folder)
    for name, record in records.items():
        found = _size(folder, name)
        if found != record.num_bytes:
            raise CheckpointError(
                f"checkpoint {folder} is not complete: {name} "
                + ("is missing" if found is None else f"has {found} of {record.num_bytes} bytes")
            )
    return records


def check_contents(folder: Path, names: Iterable[str] | None = None) -> None:
    """Check sizes like `check_sizes`, and the checksums of ``names`` (default: every listed file).

    Raises:
        CheckpointError: a file is incomplete or damaged.
        CheckpointUnreadableError: a file cannot be read.
    """
    records = check_sizes(folder)
    for name in records if names is None else names:
        with _reading(folder, name):
            found = fingerprint(folder / name)
        if found != records[name]:
            raise CheckpointError(f"checkpoint {folder} is damaged: {name} has another checksum")


def attachments_of(folder: Path) -> list[str]:
    """Return the names of the attachments. Raises CheckpointError: the marker is missing or
    damaged."""
    prefix = f"{_ATTACHMENTS}/"
    return [name[len(prefix) :] for name in read_marker(folder)[1] if name.startswith(prefix)]


def load_attachment(folder: Path, name: str) -> bytes:
    """Read the attachment ``name`` of a checkpoint.

    Raises:
        CheckpointError: the attachment does not exist, or is damaged.
        CheckpointUnreadableError: the attachment cannot be read.
    """
    key = f"{_ATTACHMENTS}/{name}"
    record = read_marker(folder)[1].get(key)
    if record is None or _size(folder, key) is None:
        raise CheckpointError(f"checkpoint {folder} has no attachment {name}")
    with _reading(folder, key):
        content = (folder / key).read_bytes()
    if FileRecord(num_bytes=len(content), crc32=zlib.crc32(content)) != record:
        raise CheckpointError(f"checkpoint {folder} is damaged: attachment {name}")
    return content


def read_marker(folder: Path) -> tuple[dict[str, Any], dict[str, FileRecord]]:
    """Read the document that was given to `seal`, and the list of files; raises CheckpointError."""
    with _reading(folder, MARKER):
        try:
            content = (folder / MARKER).read_bytes()
        except _MISSING as error:
            raise CheckpointError(f"checkpoint {folder} is not complete: no {MARKER}") from error
    try:
        document = parse_object(MARKER, content)
        field = _CHECKSUM_FIELD.search(content)
        if field is None or zlib.crc32(content[: field.start()] + b"}") != int(field[1]):
            raise CheckpointError(f"checkpoint {folder} is damaged: {MARKER} has another checksum")
        del document[_CHECKSUM]
        records = document.pop(_FILES)
        return document, {name: FileRecord(**record) for name, record in records.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder}: {MARKER} is not a valid marker") from error


def _size(folder: Path, name: str) -> int | None:
    with _reading(folder, name):
        try:
            found = (folder / name).stat()
        except _MISSING:
            return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


@contextlib.contextmanager
def _reading(folder: Path, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointUnreadableError(
            f"checkpoint {folder} cannot be read: {name}: {error}"
        ) from error
