"""Checkpoints written while training goes on: exact, all or nothing, and never in the way."""

from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import ReadItem

from tests.real.models import tiny_model
from tests.real.trainer_helpers import free_ports, random_batch, run_ranks, trainer
from torchtitan_rl.backends.titan.checkpoint import SafeLoadPlanner
from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.training.checkpoint_files import (
    MARKER,
    load_attachment,
    read_document,
    seal,
    temporary_path,
)
from torchtitan_rl.training.checkpoints import CheckpointDirectory

TIMINGS = (
    "step_s",
    "tokens_per_second",
    "tokens_per_second_per_rank",
    "flops_per_second_per_rank",
)


@contextmanager
def writing_held(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No tensor goes to disk within this context; writing goes on after it."""
    go_on = threading.Event()
    write_data = FileSystemWriter.write_data

    def held(self: FileSystemWriter, *args: Any) -> Any:
        assert go_on.wait(600.0)
        return write_data(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", held)
        try:
            yield
        finally:
            go_on.set()


def test_a_run_resumed_from_a_checkpoint_written_during_later_steps_is_bit_for_bit_the_same(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is one of the moment of saving, whatever is trained before it is on disk; of trap
    28, the trainer's share: weights, optimizer, schedule, random state, version."""
    batches = [random_batch(seed=seed) for seed in range(4)]
    path = tmp_path / "step-000002"
    with trainer(checkpoint) as policy_trainer:
        for batch in batches[:2]:
            policy_trainer.train_step(batch)
        torch.rand(7)  # away from the seeded state
        with writing_held(monkeypatch):
            policy_trainer.save_checkpoint(path, {"groups": b"three"})
            drawn = torch.rand(3)
            expected = [policy_trainer.train_step(batch).metrics for batch in batches[2:]]
            weights = {k: v.clone() for k, v in policy_trainer.hf_state_dict().items()}
            assert not path.exists()
        policy_trainer.finish_checkpoint()
        assert path.exists()
        assert CheckpointDirectory(tmp_path).choose(lambda _: None, checksums=True).path == path
    assert load_attachment(path, "groups") == b"three"
    with trainer(checkpoint) as policy_trainer:
        policy_trainer.train_step(batches[3])  # whatever was before is gone
        policy_trainer.load_checkpoint(path)
        assert policy_trainer.version == 2
        assert torch.equal(torch.rand(3), drawn)
        found = [policy_trainer.train_step(batch).metrics for batch in batches[2:]]
        state = policy_trainer.hf_state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    for one, other in zip(found, expected, strict=True):
        assert [one[k] for k in one if k not in TIMINGS] == [
            other[k] for k in other if k not in TIMINGS
        ]


def test_a_checkpoint_before_the_first_step_changes_no_later_step(
    checkpoint: Path, tmp_path: Path
) -> None:
    """To save the state of an optimizer without one, torch takes a step, which must not count."""
    path = tmp_path / "step-000000"
    batch = random_batch(seed=0)
    with trainer(checkpoint) as policy_trainer:
        expected = policy_trainer.train_step(batch).metrics["weights_digest"]
    with trainer(checkpoint) as policy_trainer:
        policy_trainer.save_checkpoint(path, {})
        policy_trainer.finish_checkpoint()
        assert policy_trainer.train_step(batch).metrics["weights_digest"] == expected
        policy_trainer.load_checkpoint(path)
        assert policy_trainer.train_step(batch).metrics["weights_digest"] == expected
    with trainer(checkpoint) as policy_trainer:
        policy_trainer.load_checkpoint(path)
        assert policy_trainer.train_step(batch).metrics["weights_digest"] == expected


def test_saving_waits_for_the_checkpoint_before_and_closing_for_the_last(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = CheckpointDirectory(tmp_path)
    with trainer(checkpoint) as policy_trainer:
        with writing_held(monkeypatch):
            policy_trainer.save_checkpoint(checkpoints.path(1), {})
            second = threading.Thread(
                target=policy_trainer.save_checkpoint, args=(checkpoints.path(2), {})
            )
            second.start()
            second.join(0.3)
            assert second.is_alive()
            assert not temporary_path(checkpoints.path(2)).exists()
        second.join()
        assert 1 in checkpoints.steps()
    assert checkpoints.steps() == [1, 2]


def test_a_write_that_fails_is_told_once_and_leaves_the_checkpoint_before(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = CheckpointDirectory(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with trainer(checkpoint) as policy_trainer:
        policy_trainer.finish_checkpoint()  # nothing to wait for
        policy_trainer.save_checkpoint(checkpoints.path(1), {})
        policy_trainer.finish_checkpoint()
        for where in ("FileSystemWriter.write_data", "write_file", "seal", "publish"):
            owner = FileSystemWriter if "." in where else "torchtitan_rl.backends.titan.checkpoint"
            with monkeypatch.context() as patch:
                name = where.rpartition(".")[2]
                if isinstance(owner, str):
                    patch.setattr(f"{owner}.{name}", full)
                else:
                    patch.setattr(owner, name, full)
                policy_trainer.save_checkpoint(checkpoints.path(2), {})
                with pytest.raises(CheckpointError, match=r"step-000002 .*No space left"):
                    policy_trainer.finish_checkpoint()
                policy_trainer.finish_checkpoint()
            assert checkpoints.steps() == [1]
            assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
        with monkeypatch.context() as patch:  # what torch makes of a full disk

            def out_of_place(*_: Any) -> None:
                raise RuntimeError("unexpected pos 704 vs 598")

            patch.setattr(FileSystemWriter, "write_data", out_of_place)
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
            policy_trainer.save_checkpoint(checkpoints.path(2), {})
            with pytest.raises(CheckpointError, match=r"no space left on the disk: .*unexpected"):
                policy_trainer.finish_checkpoint()
        policy_trainer.save_checkpoint(checkpoints.path(2), {"a/b": b""})
        with pytest.raises(CheckpointError, match="plain file name"):
            policy_trainer.save_checkpoint(checkpoints.path(2), {})
        policy_trainer.save_checkpoint(checkpoints.path(2), {})
    assert CheckpointDirectory(tmp_path).choose(
        lambda _: None, checksums=True
    ).path == checkpoints.path(2)


def test_a_torn_or_damaged_checkpoint_is_refused_and_changes_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    path = tmp_path / "step-000001"
    with trainer(checkpoint) as policy_trainer:
        policy_trainer.train_step(random_batch())
        policy_trainer.save_checkpoint(path, {})
        policy_trainer.train_step(random_batch())
        weights = {k: v.clone() for k, v in policy_trainer.hf_state_dict().items()}
        policy_trainer.finish_checkpoint()
        data = path / "__0_0.distcp"
        content = data.read_bytes()
        for broken in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
            data.write_bytes(broken)
            with pytest.raises(CheckpointError, match=r"__0_0\.distcp has"):
                policy_trainer.load_checkpoint(path)
        data.write_bytes(content)
        (path / "random-0.pt").unlink()
        seal(path, read_document(path))
        with pytest.raises(CheckpointError, match=r"random-0\.pt"):
            policy_trainer.load_checkpoint(path)
        (path / MARKER).unlink()
        with pytest.raises(CheckpointError, match="not complete"):
            policy_trainer.load_checkpoint(path)
        assert policy_trainer.version == 2
        state = policy_trainer.hf_state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in weights)


class Attack:
    """A pickle that calls a function when it is read."""

    def __init__(self, touched: Path) -> None:
        self._touched = touched

    def __reduce__(self) -> Any:
        return Path.touch, (self._touched,)


def test_a_checkpoint_that_is_more_than_data_is_refused_and_runs_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    path, touched = tmp_path / "step-000000", tmp_path / "touched"
    with trainer(checkpoint) as policy_trainer:
        policy_trainer.save_checkpoint(path, {})
        policy_trainer.finish_checkpoint()
        policy_trainer.load_checkpoint(path)
        metadata = (path / ".metadata").read_bytes()
        for content in (pickle.dumps(Attack(touched)), b"no pickle", metadata[:-20]):
            (path / ".metadata").write_bytes(content)
            seal(path, read_document(path))
            with pytest.raises(CheckpointError, match="metadata is refused"):
                policy_trainer.load_checkpoint(path)
    buffer = io.BytesIO()
    torch.save(Attack(touched), buffer)
    buffer.seek(0)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        SafeLoadPlanner().load_bytes(ReadItem(None, None, None, None, None, None), buffer)  # type: ignore[arg-type]
    assert not touched.exists()


def test_a_checkpoint_of_another_model_is_refused_by_name(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-000000"
    with trainer(checkpoint) as policy_trainer:
        policy_trainer.save_checkpoint(path, {})
    other = tiny_model(tmp_path / "untied", tied=False)
    with trainer(other) as policy_trainer, pytest.raises(CheckpointError, match="does not fit"):
        policy_trainer.load_checkpoint(path)


def test_closing_tells_that_the_last_checkpoint_could_not_be_written(
    checkpoint: Path, tmp_path: Path
) -> None:
    with (
        pytest.raises(CheckpointError, match="plain file name"),
        trainer(checkpoint) as policy_trainer,
    ):
        policy_trainer.save_checkpoint(tmp_path / "step-000001", {"../up": b""})
    assert not (tmp_path / "up").exists()


def die_while_writing(rank: int, checkpoint: Path, root: Path, port: int) -> None:
    """A process that kill -9 meets in the middle of its second checkpoint."""
    os.environ["MASTER_PORT"] = str(port)
    checkpoints = CheckpointDirectory(root)

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600.0)

    patch = pytest.MonkeyPatch()
    with trainer(checkpoint) as policy_trainer:
        policy_trainer.save_checkpoint(checkpoints.path(1), {})
        policy_trainer.train_step(random_batch())
        policy_trainer.finish_checkpoint()
        patch.setattr("torchtitan_rl.backends.titan.checkpoint.seal", die)
        policy_trainer.save_checkpoint(checkpoints.path(2), {})
        policy_trainer.finish_checkpoint()


def test_kill_9_in_the_middle_of_writing_leaves_the_checkpoint_before(
    checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
        run_ranks(die_while_writing, 1, checkpoint, tmp_path, *free_ports(1))
    checkpoints = CheckpointDirectory(tmp_path)
    assert temporary_path(checkpoints.path(2)).exists()  # it was in the middle
    found = checkpoints.choose(lambda _: None, checksums=True)
    assert (found.path, found.passed_over) == (checkpoints.path(1), ())
    with trainer(checkpoint) as policy_trainer:
        policy_trainer.load_checkpoint(checkpoints.path(1))
