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
from torchtitan_rl.files import append_line, open_for_append, replace_file, whole_lines


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
        assert list(whole_lines(path)) == [*lines, b"next\n"]


def test_lines_that_the_disk_takes_a_part_of_leave_nothing(tmp_path: Path) -> None:
    with open_for_append(tmp_path / "f") as file:
        append_line(file, b"one\n")
        with files_of_at_most(6), pytest.raises(OSError, match="too large"):
            append_line(file, b"two\nthree\n")
        append_line(file, b"four\n")
    assert (tmp_path / "f").read_bytes() == b"one\nfour\n"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "f"
    replace_file(file, b"old")
    with files_of_at_most(3), pytest.raises(OSError, match="too large"):
        replace_file(file, b"new one")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]
    replace_file(file, b"new one", is_durable=False)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new one"]
