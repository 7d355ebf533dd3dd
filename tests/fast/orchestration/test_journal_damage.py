"""Journals that are damaged, or that the system can neither read nor remove just now."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fast.orchestration.test_journal import append
from tests.fast.orchestration.test_journal_directory import begun, names, record, sampled
from torchtitan_rl.orchestration.journal import JournalError, _line
from torchtitan_rl.orchestration.journal_directory import JournalDirectory

Damage = Callable[[bytes], bytes]


def with_header(content: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    header, *rest = content.splitlines(keepends=True)
    row = json.loads(header[9:])
    change(row)
    return _line(row) + b"".join(rest)


def with_flipped_turn(content: bytes) -> bytes:
    header, turn, *rest = content.splitlines(keepends=True)
    return b"".join([header, b"x" + turn[1:], *rest])


DAMAGES: dict[str, Damage] = {
    "a flipped header": lambda content: b"x" + content[1:],
    "a cut header": lambda content: content[:9],
    "nothing": lambda content: b"",
    "zeros": lambda content: bytes(4096),
    "joined first lines": lambda content: content.replace(b"\n", b"", 1),
    "no header": lambda content: content.partition(b"\n")[2],
    "another format": lambda content: with_header(content, lambda row: row.update(format=99)),
    "no lineage": lambda content: with_header(content, lambda row: row.pop("lineage")),
    "a flipped turn": with_flipped_turn,
    "a cut last line": lambda content: content[:-5],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("damaged_step", [0, 5, 10])
def test_a_run_restarts_and_goes_on_whatever_file_is_damaged_and_however(
    tmp_path: Path, damage: Damage, damaged_step: int
) -> None:
    """It resumes from step 5; files of before and after it are there."""
    one, two, new = sampled(0, 0), sampled(1, 0), sampled(1, 0, salt=1)
    journals = begun(tmp_path)
    for step in (5, 10, 15):
        for salt in (1, 2):
            append(journals, "b", 0, sampled(0, 0, salt=salt))
        journals.begin(step)
    damaged = tmp_path / f"step-{damaged_step:06d}.jsonl"
    damaged.write_bytes(damage(damaged.read_bytes()))

    second = JournalDirectory(tmp_path)
    found = second.restore(5, record(one))
    assert found["a"] == record(one)["a"]
    second.start_lineage(5, record(one, two), record(one))
    assert JournalDirectory(tmp_path).restore(5, record(one)) == record(one, two)
    second.begin(10)
    append(second, "a", 1, new)
    assert JournalDirectory(tmp_path).restore(10, record(one)) == record(one, new)
    second.close()

    third = JournalDirectory(tmp_path)
    third.start_lineage(10, {}, {})
    third.close()


@pytest.fixture
def unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JournalDirectory:
    """A directory of whose one file the system can read nothing just now."""
    append(begun(tmp_path), "a", 0, sampled(0, 0))
    opened = Path.open

    def broken(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "step-000000.jsonl":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", broken)
    return JournalDirectory(tmp_path)


def test_a_file_that_the_system_cannot_read_may_be_of_the_newest_lineage(
    unreadable: JournalDirectory,
) -> None:
    with pytest.raises(JournalError, match=r"step-000000\.jsonl cannot be read: .*Input/output"):
        unreadable.start_lineage(5, {}, {})


def test_a_file_that_the_system_cannot_read_is_not_passed_over(
    unreadable: JournalDirectory,
) -> None:
    """Its turns are there and would be sampled again."""
    with pytest.raises(JournalError, match=r"step-000000\.jsonl cannot be read: .*Input/output"):
        unreadable.restore(0, {})
    assert unreadable.passed_over == []


def test_a_folder_that_the_system_cannot_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "iterdir", broken)
    for call in (lambda one: one.restore(0, {}), lambda one: one.prune(5)):
        with pytest.raises(JournalError, match=r"cannot be read: .*Permission denied"):
            call(JournalDirectory(tmp_path))


def test_files_that_cannot_be_removed_are_named_and_all_others_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journals = begun(tmp_path)
    for step in (5, 10, 15):
        journals.begin(step)
    unlink = Path.unlink

    def broken(path: Path) -> None:
        if path.name == "step-000005.jsonl":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path)

    monkeypatch.setattr(Path, "unlink", broken)
    with pytest.raises(JournalError, match=r"step-000005\.jsonl: .*Read-only"):
        journals.prune(15)
    assert names(tmp_path) == ["step-000005.jsonl", "step-000015.jsonl"]
