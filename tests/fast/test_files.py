"""Files of lines, whole whatever kills the process that writes them."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl import files
from torchtitan_rl.files import append_line, lines_from_the_end, open_for_append, whole_lines


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """As on a disk with so much room, a file takes a part of what would make it longer."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


LINES = st.lists(st.binary(max_size=9).map(lambda text: text.replace(b"\n", b"") + b"\n"))


@given(lines=LINES, torn=st.binary(max_size=40), block=st.integers(1, 12))
def test_a_torn_line_is_cut_off_before_anything_comes_after_it(
    lines: list[bytes], torn: bytes, block: int
) -> None:
    torn = torn.replace(b"\n", b"\r")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_BLOCK_BYTES", block)
        path = Path(folder) / "f"
        path.write_bytes(b"".join(lines) + torn)
        assert list(whole_lines(path)) == lines
        with open_for_append(path) as file:
            append_line(file, b"next\n")
            found = list(lines_from_the_end(file, file.tell()))
        assert list(whole_lines(path)) == [*lines, b"next\n"]
        assert [line for _, line in reversed(found)] == [*lines, b"next\n"]
        content = path.read_bytes()
        assert all(content[start:].startswith(line) for start, line in found)


def test_lines_that_the_disk_takes_a_part_of_leave_nothing(tmp_path: Path) -> None:
    with open_for_append(tmp_path / "f") as file:
        append_line(file, b"one\n")
        with files_of_at_most(6), pytest.raises(OSError, match="too large"):
            append_line(file, b"two\nthree\n")
        append_line(file, b"four\n")
    assert (tmp_path / "f").read_bytes() == b"one\nfour\n"


def test_reading_from_the_end_reads_no_more_than_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_BLOCK_BYTES", 8)
    (tmp_path / "f").write_bytes(b"line\n" * 1000)
    read: list[int] = []
    pread = files.os.pread

    def count(descriptor: int, length: int, start: int) -> bytes:
        read.append(length)
        return pread(descriptor, length, start)

    monkeypatch.setattr(files.os, "pread", count)
    with open_for_append(tmp_path / "f") as file:
        next(lines_from_the_end(file, file.tell()))
    assert sum(read) <= 16
