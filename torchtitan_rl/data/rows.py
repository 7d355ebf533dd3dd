"""Rows of data files, read one at a time: JSON Lines, Parquet, Hugging Face `datasets`.

Only an index is in memory (the offset of each line; the sizes of row groups), and of Parquet the
row group that was read last. Rows are in blocks: reading the rows of one block after another is
cheap in any order.

| source | read by | block |
|---|---|---|
| ``data/*.jsonl`` (also ``.ndjson``, ``.json``) | offset of the line | the file |
| ``data/*.parquet`` | row group | a row group |
| ``hf:NAME``, ``hf:NAME:CONFIG:SPLIT`` | memory-mapped Arrow file | the split |

Which split a problem belongs to: decided by its text, so that equal ones are in the same.
"""

from __future__ import annotations

import functools
import glob
import json
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from importlib import import_module
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import xxhash

from torchtitan_rl.errors import ConfigError, TorchtitanRLError, one_line
from torchtitan_rl.rollout.task import Split

Row = Mapping[str, Any]

HUB_PREFIX = "hf:"
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_SAVED = ("state.json", "dataset_dict.json")  # what `save_to_disk` writes
_SCAN_BYTES = 1 << 22
_SAMPLE_BYTES = 1 << 20
_NUM_SAMPLES = 256
_ONE_A_LINE = "write one object a line (JSON Lines)"


class DataError(TorchtitanRLError):
    """A row cannot be used; names the file, the line and the column."""


class Rows(Protocol):
    """The rows of one file."""

    @property
    def name(self) -> str:
        """Of the file; an id of a row begins with it."""
        ...

    @property
    def blocks(self) -> Sequence[int]:
        """Number of rows in each block."""
        ...

    @property
    def size(self) -> str:
        """What changes when the file does, for the comparison of a resumed run."""
        ...

    def number(self, block: int, index: int) -> int:
        """Of a row in its file, from 1: the line of JSON Lines."""
        ...

    def place(self, number: int) -> str:
        """Of a row, for error messages."""
        ...

    def read(self, block: int, index: int) -> Row | None:
        """A row; None if it is empty (a line without text).

        Raises:
            DataError: it cannot be read.
        """
        ...


def open_sources(sources: Sequence[str]) -> list[Rows]:
    """The files of all sources, in their order; those of a pattern sorted by name.

    Raises:
        ConfigError: a source names no file, or one that cannot be read.
    """
    opened: list[Rows] = []
    for source in sources:
        if source.startswith(HUB_PREFIX):
            opened.append(HubRows(source))
            continue
        paths = sorted(glob.glob(source, recursive=True))
        if not paths:
            raise ConfigError(f"{source}: there is no such file; give a file, or a pattern of some")
        opened += map(_open_file, paths)
    names = [rows.name for rows in opened]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{twice[0]}: two files have this name, part of their ids; rename one")
    return opened


def _open_file(path: str) -> Rows:
    suffix = Path(path).suffix
    if suffix not in (*_JSON_LINES, ".parquet"):
        raise ConfigError(
            f"{path}: cannot tell the format; give {', '.join(_JSON_LINES)} (JSON Lines), .parquet "
            "or hf:NAME"
        )
    try:
        return ParquetRows(path) if suffix == ".parquet" else JsonLinesRows(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error


class JsonLinesRows:
    """One JSON object in each line; empty lines are passed over."""

    def __init__(self, path: str) -> None:
        self.name = Path(path).name
        self._path = path
        self._file = FileIO(path)
        now = os.fstat(self._file.fileno())
        self._num_bytes = now.st_size
        self._ends, self._digest = _scan(path, now.st_size, now.st_mtime_ns)

    @property
    def blocks(self) -> Sequence[int]:
        return (len(self._ends),) if len(self._ends) else ()

    @property
    def size(self) -> str:
        return f"{self.name}: {self._num_bytes} bytes ({self._digest})"

    def number(self, block: int, index: int) -> int:
        return index + 1

    def place(self, number: int) -> str:
        return f"{self._path}, line {number}"

    def read(self, block: int, index: int) -> Row | None:
        start = int(self._ends[index - 1]) + 1 if index else 0
        line = os.pread(self._file.fileno(), int(self._ends[index]) - start, start)
        if not line.strip():
            return None
        try:
            row = json.loads(line)
        except ValueError as error:
            if os.pread(self._file.fileno(), _SCAN_BYTES, 0).lstrip().startswith(b"["):
                raise DataError(f"{self._path} is a JSON array: {_ONE_A_LINE}") from error
            raise DataError(f"{self.place(index + 1)}: not JSON ({error})") from error
        if not isinstance(row, dict):
            what = "a JSON array" if isinstance(row, list) else "not a JSON object"
            raise DataError(f"{self.place(index + 1)} is {what}: {_ONE_A_LINE}")
        return row


@functools.lru_cache(maxsize=64)  # a run opens its files several times before it starts
def _scan(path: str, num_bytes: int, _mtime_ns: int) -> tuple[Any, str]:
    """Where each line ends, as an array of 8 bytes a line (the last one may lack its line break),
    and a digest of the file."""
    import numpy as np

    ends, digest = [np.empty(0, np.int64)], xxhash.xxh3_64()
    with FileIO(path) as file:
        for offset in range(0, num_bytes, _SCAN_BYTES):
            chunk = os.pread(file.fileno(), _SCAN_BYTES, offset)
            digest.update(chunk)
            ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + offset)
    found = np.concatenate(ends)
    is_open = num_bytes and (not len(found) or found[-1] != num_bytes - 1)
    return np.append(found, num_bytes) if is_open else found, digest.hexdigest()


@functools.lru_cache(maxsize=64)
def _digest_of_samples(path: str, num_bytes: int, _mtime_ns: int) -> str:
    """Of the whole file up to 256 MiB; of a larger one, of so much, evenly spread."""
    digest = xxhash.xxh3_64()
    with FileIO(path) as file:
        for offset in _evenly(num_bytes, _SAMPLE_BYTES):
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
    return digest.hexdigest()


def _evenly(size: int, step: int = 1) -> list[int]:
    """Where samples of ``step`` begin: the first and the last, and all where there are few."""
    last = max(0, size - step)
    if size <= _NUM_SAMPLES * step:
        return list(range(0, size, step))
    return [last * number // (_NUM_SAMPLES - 1) for number in range(_NUM_SAMPLES)]


class ParquetRows:
    """A row group is decoded at a time, and kept until another one is needed."""

    def __init__(self, path: str) -> None:
        parquet = require("pyarrow.parquet", "pyarrow")
        self.name = Path(path).name
        self._path = path
        try:
            self._file = parquet.ParquetFile(path, memory_map=True)
        except ValueError as error:  # pyarrow.ArrowInvalid
            raise OSError(error) from error
        metadata = self._file.metadata
        self.blocks: Sequence[int] = [
            metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)
        ]
        now = Path(path).stat()
        self._num_bytes = now.st_size
        self._digest = _digest_of_samples(path, now.st_size, now.st_mtime_ns)
        self._block: int | None = None
        self._table: Any = None

    @property
    def size(self) -> str:
        return f"{self.name}: {self._num_bytes} bytes ({self._digest})"

    def number(self, block: int, index: int) -> int:
        return sum(self.blocks[:block]) + index + 1

    def place(self, number: int) -> str:
        return f"{self._path}, row {number}"

    def read(self, block: int, index: int) -> Row | None:
        if self._block != block:
            try:
                self._table, self._block = self._file.read_row_group(block), block
            except (OSError, ValueError) as error:
                raise DataError(f"{self._path}, row group {block + 1}: {error}") from error
        (row,) = self._table.slice(index, 1).to_pylist()
        found: Row = row
        return found


class HubRows:
    """A split of a dataset of the Hugging Face hub, or of a local folder in the place of its name:
    one in the hub's layout, or one that `datasets` wrote by ``save_to_disk``."""

    def __init__(self, source: str) -> None:
        datasets = require("datasets", "datasets")
        name, config, split = ([*source.removeprefix(HUB_PREFIX).split(":"), "", ""])[:3]
        split = split or "train"
        self.name = f"{Path(name).name}-{split}"
        try:
            if (Path(name) / "state.json").is_file() or (
                Path(name) / "dataset_dict.json"
            ).is_file():
                loaded = datasets.load_from_disk(name)
                self._rows = loaded[split] if isinstance(loaded, dict) else loaded
            else:
                self._rows = datasets.load_dataset(name, config or None, split=split)
        except Exception as error:  # of a dozen libraries: network, files, names
            cause = one_line(error)
            raise ConfigError(
                f"{source}: cannot be loaded ({cause}); give hf:NAME:CONFIG:SPLIT of the hub, or a "
                "local folder as NAME"
            ) from error
        # The library's own fingerprint depends on when the files were written to its cache.
        tables = self._rows.with_format("arrow")
        digest = xxhash.xxh3_64()
        for index in _evenly(len(self._rows)):
            digest.update(repr(tables[index : index + 1].to_pylist()).encode())
        self._digest = digest.hexdigest()

    @property
    def blocks(self) -> Sequence[int]:
        return (len(self._rows),) if len(self._rows) else ()

    @property
    def size(self) -> str:
        return f"{self.name}: {len(self._rows)} rows ({self._digest})"

    def number(self, block: int, index: int) -> int:
        return index + 1

    def place(self, number: int) -> str:
        return f"{self.name}, row {number}"

    def read(self, block: int, index: int) -> Row | None:
        row: Row = self._rows[index]
        return row


def require(module: str, package: str) -> Any:
    """
    Raises:
        ConfigError: the package of an optional module is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{package} is not installed ({error}); pip install 'torchtitan-rl[tasks]'"
        ) from error


def in_split(split: Split, text: str, validation_share: float) -> bool:
    """The same for the same text, in every run."""
    digest = blake2b(text.encode(), digest_size=6).digest()
    is_validation = int.from_bytes(digest, "big") / 2**48 < validation_share
    return is_validation == (split == "validation")
