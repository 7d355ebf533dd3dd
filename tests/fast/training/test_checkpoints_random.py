"""Random lives of a checkpoint directory: written, killed halfway, damaged, pruned, resumed."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fast.training.test_checkpoints import names
from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.files import write_file
from torchtitan_rl.training.checkpoint_files import (
    publish,
    read_document,
    seal,
    temporary_path,
)
from torchtitan_rl.training.checkpoints import CheckpointDirectory, NewestCheckpoint

ACTIONS = ("save", "save", "save", "killed before seal", "killed before publish", "damage")


class Run:
    """A run that counts steps and remembers which of its checkpoints must be good."""

    def __init__(self, root: Path, seed: int) -> None:
        self.checkpoints = CheckpointDirectory(root)
        self.random = random.Random(seed)
        self.step = 0
        self.good: dict[int, int] = {}  # step to what was written
        self.writes = 0

    def write(self, *, until: str = "") -> None:
        self.step += self.random.randint(0, 2)
        self.writes += 1
        path = self.checkpoints.path(self.step)
        folder = temporary_path(path)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "data", self.random.randbytes(self.random.randint(1, 9)))
        if until == "seal":
            return
        seal(folder, {"write": self.writes})
        if until == "publish":
            return
        publish(path)
        self.good[self.step] = self.writes

    def damage(self) -> None:
        """Damage the newest one, as a disk that lost the last write."""
        if self.good:
            step = max(self.good)
            data = self.checkpoints.path(step) / "data"
            content = data.read_bytes()
            flipped = content[:-1] + bytes([content[-1] ^ 1])
            data.write_bytes(self.random.choice([content[:-1], flipped]))
            del self.good[step]

    def resume(self) -> None:
        root = self.checkpoints.root
        if not self.good:
            before = names(root)
            if all(name.endswith((".writing", ".removed")) for name in before):
                assert self.checkpoints.newest(checksums=True) == NewestCheckpoint()
            else:
                with pytest.raises(CheckpointError, match="were not changed"):
                    self.checkpoints.newest(checksums=True)
                assert names(root) == before
                shutil.rmtree(root)  # as the message says
                root.mkdir()
            self.step = 0
            return
        found = self.checkpoints.newest(checksums=True)
        self.step = max(self.good)
        assert found.path == self.checkpoints.path(self.step)
        assert read_document(found.path) == {"write": self.good[self.step]}


@given(seed=st.integers(0, 2**32), actions=st.lists(st.sampled_from(ACTIONS), max_size=12))
@settings(max_examples=60, deadline=None)
def test_resuming_finds_the_newest_good_checkpoint_whatever_happened(
    seed: int, actions: list[str]
) -> None:
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)  # saves time
        run = Run(Path(root), seed)
        for action in actions:
            if action == "save":
                run.write()
                removed = run.checkpoints.prune(run.random.randint(1, 3))
                assert run.step not in removed
                for step in removed:
                    del run.good[step]
                continue
            if action == "damage":
                run.damage()
            else:
                run.write(until=action.rpartition(" ")[2])
            run.resume()
        run.resume()
