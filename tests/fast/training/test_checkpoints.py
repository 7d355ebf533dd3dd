"""Checkpoint directories, and where policies come from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.files import write_file
from torchtitan_rl.training.checkpoint_files import (
    MARKER,
    check_sizes,
    discard,
    load_attachment,
    publish,
    read_document,
    seal,
    temporary_path,
    write_attachments,
)
from torchtitan_rl.training.checkpoints import CheckpointDirectory, NewestCheckpoint


def write(path: Path, data: bytes = b"weights") -> None:
    """As `CheckpointWriter` does it."""
    folder = temporary_path(path)
    try:
        folder.mkdir(parents=True)
        write_file(folder / "data", data)
        write_attachments(folder, {"groups": b"3 groups"})
        seal(folder, {"version": 1})
        publish(path)
    except OSError:
        discard(path)
        raise


def names(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir())


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")
    assert checkpoints.choose(lambda _: None).path is None
    for step in (20, 9, 1_000_000):
        write(checkpoints.path(step))
    assert checkpoints.steps() == [9, 20, 1_000_000]
    assert checkpoints.choose(lambda _: None, checksums=True) == NewestCheckpoint(
        path=checkpoints.path(1_000_000), step=1_000_000
    )
    assert read_document(checkpoints.path(9)) == {"version": 1}
    assert load_attachment(checkpoints.path(9), "groups") == b"3 groups"
    with pytest.raises(CheckpointError, match="step-000009 has no attachment turns"):
        load_attachment(checkpoints.path(9), "turns")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize(
    ("damage", "file", "message"),
    [
        (cut, "data", "data has 6 of 7 bytes"),
        (Path.unlink, "data", "data is missing"),
        (cut, "attachments/groups", "groups has 7 of 8 bytes"),
        (Path.unlink, MARKER, f"no {MARKER}"),
        (lambda path: path.write_bytes(path.read_bytes()[:20]), MARKER, "not a valid marker"),
        (lambda path: path.write_text(200_000 * "["), MARKER, "not a valid marker"),
        (lambda path: path.write_text("{}"), MARKER, "another checksum"),
        (flip, "data", "data has another checksum"),
        (flip, "attachments/groups", "groups has another checksum"),
    ],
)
def test_a_torn_checkpoint_is_passed_over_reported_and_set_aside(
    tmp_path: Path, damage: Callable[[Path], None], file: str, message: str
) -> None:
    checkpoints = CheckpointDirectory(tmp_path)
    for step in (1, 2):
        write(checkpoints.path(step))
    damage(checkpoints.path(2) / file)
    found = checkpoints.choose(lambda _: None, checksums=damage is flip)
    assert found.path == checkpoints.path(1)
    assert len(found.passed_over) == 1
    assert "step-000002" in found.passed_over[0]
    assert message in found.passed_over[0]
    # A resumed run is at a lower step; a checkpoint that was passed over never counts again.
    assert checkpoints.prune(keep=1) == []
    assert names(tmp_path) == ["step-000001", "step-000002.rejected"]
    write(checkpoints.path(3))
    checkpoints.prune(keep=1)
    assert names(tmp_path) == ["step-000003"]


def test_a_damaged_attachment_is_refused_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "step-000001")
    flip(tmp_path / "step-000001" / "attachments" / "groups")
    with pytest.raises(CheckpointError, match="damaged: attachment groups"):
        load_attachment(tmp_path / "step-000001", "groups")


def test_pruning_keeps_the_newest_complete_ones_and_removes_torn_ones_before_them(
    tmp_path: Path,
) -> None:
    checkpoints = CheckpointDirectory(tmp_path)
    for step in (1, 2, 3, 4, 5):
        write(checkpoints.path(step))
    (checkpoints.path(4) / "data").unlink()
    temporary_path(checkpoints.path(2)).mkdir()
    temporary_path(checkpoints.path(6)).mkdir()  # is being written
    checkpoints.path(7).mkdir()  # not complete: never counts as one to keep
    (tmp_path / "notes.txt").write_text("not ours")
    assert checkpoints.prune(keep=2) == [1, 2]
    assert names(tmp_path) == [
        "notes.txt",
        "step-000003",
        "step-000005",
        "step-000006.writing",
        "step-000007",
    ]


def test_any_flipped_bit_of_the_document_is_found(tmp_path: Path) -> None:
    """A damaged document may still be valid JSON: step 6 instead of 7."""
    folder = tmp_path / "step-000007"
    folder.mkdir()
    document = {"version": 7, "extra": {"step": 7, "name": "a \u00e9 b", "reward": 0.25}}
    write_file(folder / "data", b"weights")
    seal(folder, document)
    marker = folder / MARKER
    content = marker.read_bytes()
    assert read_document(folder) == document
    for position in range(content.rindex(b", ")):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            marker.write_bytes(flipped)
            with pytest.raises(CheckpointError, match=r"another checksum|not a valid marker"):
                read_document(folder)
    marker.write_bytes(content.replace(b'"version": 7', b'"version": 6'))
    with pytest.raises(CheckpointError, match=rf"{MARKER} has another checksum"):
        check_sizes(folder)
