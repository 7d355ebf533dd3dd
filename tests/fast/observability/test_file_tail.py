from __future__ import annotations

from torchtitan_rl.files import FileCopies, read_new


def bring(source, copies, **limits):
    pieces = read_new(source, copies.offsets, patterns=("*.log",), **limits)
    copies.write(pieces)
    return pieces


def test_copies_grow_with_the_originals(tmp_path):
    source, copies = tmp_path / "there", FileCopies(tmp_path / "here")
    source.mkdir()
    (source / "replica0-rank0.log").write_text("one\n")
    (source / "other.txt").write_text("not wanted")
    bring(source, copies)
    with (source / "replica0-rank0.log").open("a") as file:
        file.write("two\n")
    (source / "replica1-rank0.log").write_text("three\n")
    bring(source, copies)
    assert bring(source, copies) == []
    found = {path.name: path.read_text() for path in (tmp_path / "here").iterdir()}
    assert found == {
        "replica0-rank0.log": "one\ntwo\n",
        "replica1-rank0.log": "three\n",
    }


def test_what_is_too_far_behind_is_left_out_and_said(tmp_path):
    source, copies = tmp_path / "there", FileCopies(tmp_path / "here")
    source.mkdir()
    (source / "a.log").write_text("old" * 100 + "new")
    bring(source, copies, max_behind_bytes=3)
    assert copies.path("a.log").read_text() == "\n[300 bytes are left out]\nnew"
    assert bring(source, copies) == []


def test_a_piece_that_arrives_twice_is_written_once(tmp_path):
    source, copies = tmp_path / "there", FileCopies(tmp_path / "here")
    source.mkdir()
    (source / "a.log").write_text("once")
    pieces = bring(source, copies)
    copies.write(pieces)
    assert copies.path("a.log").read_text() == "once"
