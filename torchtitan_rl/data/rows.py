"""Rows of data files, read one at a time: JSON Lines, Parquet, Hugging Face `datasets`.

Only an index is in memory (the offset of each line; the sizes of row groups), and for a Parquet
file the row group that was read last. Rows belong to blocks. The rows of one block can be read in
any order at low cost.

| source | read by | block |
|---|---|---|
| ``data/*.jsonl`` (also ``.ndjson``, ``.json``) | offset of the line | the file |
| ``data/*.parquet`` | row group | a row group |
| ``hf:NAME``, ``hf:NAME:CONFIG:SPLIT`` | memory-mapped Arrow file | the split |
"""

from __future__ import annotations

import functools
import glob
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import xxhash

from torchtitan_rl.errors import ConfigError, TorchtitanRLError, one_line

Row = Mapping[str, Any]

HUB_PREFIX = "hf:"
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_SAVED = ("state.json", "dataset_dict.json")  # files that `save_to_disk` writes
_HUB_S = 10.0  # for one question to the hub
_SCAN_BYTES = 1 << 22
_SAMPLE_BYTES = 1 << 20
_NUM_SAMPLES = 256
_ONE_A_LINE = "write one object a line (JSON Lines)"


class DataError(TorchtitanRLError):
    """A row cannot be used. The message names the file, the line and the column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one source, which are read by their index."""

    name: str
    """Name of the source; ids of rows begin with it."""
    size: str
    """A text that changes if the rows change; a resumed run compares it."""
    blocks: Sequence[int]
    """Number of rows in each block."""
    read: Callable[[int], Row | None]
    """Returns the row with an index (from 0), or None for an empty line. Raises a `DataError` if
    the row cannot be read."""
    place: str
    """The text before a row's number in error messages, such as ``data/train.jsonl, line``."""
    first: int = 1
    """The number of the first row, for ids and error messages."""


def open_sources(sources: Sequence[str]) -> list[Rows]:
    """Open the files of all sources, in their order; files of a pattern are sorted by name.
    ConfigError: a source names no file, or a file cannot be read."""
    opened: list[Rows] = []
    for source in sources:
        if source.startswith(HUB_PREFIX):
            opened.append(_hub(source))
            continue
        paths = sorted(glob.glob(source, recursive=True))
        if not paths:
            raise ConfigError(f"{source}: there is no such file; give a file, or a pattern of some")
        opened += map(_open_file, paths)
    names = [rows.name for rows in opened]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{twice[0]}: two files have this name, part of their ids; rename one")
    return opened


def contents_of(config: object, *names: str) -> dict[str, list[str]]:
    """What identifies the contents of the files in each field of ``names``."""
    found = {}
    for name in names:
        with suppress(ConfigError):  # a check of the run reports it
            found[name] = [rows.size for rows in open_sources(getattr(config, name))]
    return found


def _open_file(path: str) -> Rows:
    suffix = Path(path).suffix
    if suffix not in (*_JSON_LINES, ".parquet"):
        known = f"{', '.join(_JSON_LINES)} (JSON Lines), .parquet or hf:NAME"
        raise ConfigError(f"{path}: cannot tell the format; give {known}")
    try:
        return _parquet(path) if suffix == ".parquet" else _json_lines(path)
    except (OSError, ValueError) as error:  # pyarrow.ArrowInvalid is a ValueError
        raise ConfigError(f"{path}: cannot be read ({error})") from error


def _json_lines(path: str) -> Rows:
    """Open a file with one JSON object in each line; empty lines are skipped."""
    file = FileIO(path)
    now = os.fstat(file.fileno())
    ends, digest = _scan(path, now.st_size, now.st_mtime_ns)

    def read(index: int) -> Row | None:
        start = int(ends[index - 1]) + 1 if index else 0
        line = os.pread(file.fileno(), int(ends[index]) - start, start)
        if not line.strip():
            return None
        place = f"{path}, line {index + 1}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if os.pread(file.fileno(), _SCAN_BYTES, 0).lstrip().startswith(b"["):
                raise DataError(f"{path} is a JSON array: {_ONE_A_LINE}") from error
            raise DataError(f"{place}: not JSON ({error})") from error
        if not isinstance(row, dict):
            what = "a JSON array" if isinstance(row, list) else "not a JSON object"
            raise DataError(f"{place} is {what}: {_ONE_A_LINE}")
        if b"\\u" in line and (name := _column_without_utf8(row)):
            why = "has half of a surrogate pair (\\ud800 to \\udfff); write the character"
            raise DataError(f"{place}: column {name} {why}, or remove it")
        return row

    name = Path(path).name
    size = f"{name}: {now.st_size} bytes ({digest})"
    return Rows(name=name, size=size, blocks=(len(ends),), read=read, place=f"{path}, line")


def _column_without_utf8(row: Row) -> str:
    """The first column, quoted, whose name or value cannot be written as UTF-8, or nothing."""
    for name, value in row.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return ascii(name)
    return ""


@functools.lru_cache(maxsize=64)  # a run opens its files several times before it starts
def _scan(path: str, num_bytes: int, _mtime_ns: int) -> tuple[Any, str]:
    """The offset of each line's end (int64), and a digest of the file."""
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


def _parquet(path: str) -> Rows:
    """Open a Parquet file. One row group is decoded at a time, and kept until another is needed."""
    file = require("pyarrow.parquet", "pyarrow").ParquetFile(path, memory_map=True)
    metadata = file.metadata
    blocks = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    starts = list(accumulate(blocks, initial=0))

    @functools.lru_cache(maxsize=1)
    def decoded(block: int) -> Any:
        try:
            return file.read_row_group(block)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}, row group {block + 1}: {error}") from error

    def read(index: int) -> Row:
        block = bisect_right(starts, index) - 1
        rows = decoded(block)
        try:
            row: Row = rows.slice(index - starts[block], 1).to_pylist()[0]
        except ValueError as error:  # a text that is not UTF-8
            raise DataError(f"{path}, row {index + 1}: {error}") from error
        return row

    now = Path(path).stat()
    digest = _digest_of_samples(path, now.st_size, now.st_mtime_ns)
    name = Path(path).name
    size = f"{name}: {now.st_size} bytes ({digest})"
    return Rows(name=name, size=size, blocks=blocks, read=read, place=f"{path}, row")


@functools.lru_cache(maxsize=64)
def _digest_of_samples(path: str, num_bytes: int, _mtime_ns: int) -> str:
    """A digest of the whole file, or of 256 evenly spread samples if it is larger than 256 MiB."""
    digest = xxhash.xxh3_64()
    with FileIO(path) as file:
        for offset in _evenly(num_bytes, _SAMPLE_BYTES):
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))
    return digest.hexdigest()


def _evenly(size: int, step: int = 1) -> list[int]:
    """Evenly spread start offsets of samples of length ``step``; all, if there are few."""
    last = max(0, size - step)
    if size <= _NUM_SAMPLES * step:
        return list(range(0, size, step))
    return [last * number // (_NUM_SAMPLES - 1) for number in range(_NUM_SAMPLES)]


def _hub(source: str) -> Rows:
    """Open a split of a Hugging Face dataset, of the hub or in a local folder, which has the hub's
    layout or was written by ``save_to_disk``."""
    datasets = require("datasets", "datasets")
    folder, config, split = ([*source.removeprefix(HUB_PREFIX).split(":"), "", ""])[:3]
    split = split or "train"
    absent = "" if Path(folder).is_dir() else _unreachable(folder)
    if absent:
        datasets.config.HF_HUB_OFFLINE = True  # or `datasets` would try again for half a minute
    try:
        if any(Path(folder, saved).is_file() for saved in _SAVED):
            loaded = datasets.load_from_disk(folder)
            rows = loaded[split] if isinstance(loaded, dict) else loaded
        else:
            rows = datasets.load_dataset(folder, config or None, split=split)
    except Exception as error:  # a dozen libraries may raise: network, files, names
        cause = f"not in the cache, and the hub: {absent}" if absent else one_line(error)
        fix = "give hf:NAME:CONFIG:SPLIT of the hub, or a local folder as NAME"
        if absent:
            fix = "connect to the hub, or give .jsonl or .parquet files, or a local folder as NAME"
        raise ConfigError(f"{source}: cannot be loaded ({cause}); {fix}") from error
    # Not the library's fingerprint, which depends on when the files were written to its cache.
    tables, digest = rows.with_format("arrow"), xxhash.xxh3_64()
    for index in _evenly(len(rows)):
        digest.update(repr(tables[index : index + 1].to_pylist()).encode())
    name = f"{Path(folder).name}-{split}"
    size = f"{name}: {len(rows)} rows ({digest.hexdigest()})"
    return Rows(
        name=name, size=size, blocks=(len(rows),), read=rows.__getitem__, place=f"{name}, row"
    )


def _unreachable(name: str) -> str:
    """Say why the Hugging Face hub does not answer; "" if it does."""
    import httpx
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(name, timeout=_HUB_S)
    except httpx.TransportError as error:
        return one_line(error)
    except Exception:  # an answer, or a wrong name: `datasets` says so
        pass
    return ""


def require(module: str, package: str) -> Any:
    """Import an optional module. ConfigError: its package is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        fix = "pip install 'torchtitan-rl[tasks]'"
        raise ConfigError(f"{package} is not installed ({error}); {fix}") from error
