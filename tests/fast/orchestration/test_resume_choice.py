"""Which checkpoint of a simulated run another one goes on from."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fast.orchestration.test_journal import FIRST, append
from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.orchestration.consumer import StopRequested
from torchtitan_rl.orchestration.journal import Journal
from torchtitan_rl.orchestration.journal_directory import JournalDirectory
from torchtitan_rl.orchestration.recovery import choose_checkpoint
from torchtitan_rl.orchestration.saved_run import GROUPS
from torchtitan_rl.training.checkpoint_files import (
    MARKER,
    read_document,
    seal,
)
from torchtitan_rl.training.checkpoints import CheckpointDirectory

PLAN = Plan(staleness=1, checkpoint_every=1, num_steps=6, turns=2, env_delay_s=5.0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run that was stopped after step 3; checkpoints of steps 2 and 3 are there."""

    async def run() -> None:
        simulation = Simulation(PLAN, tmp_path)

        def record_step(record: Any) -> None:
            if record.step == 3:
                simulation.controller.request_stop()

        simulation.recorder.record_step = record_step  # type: ignore[method-assign]
        with pytest.raises(StopRequested):
            await simulation.run()

    run_virtually(run())
    return tmp_path


def chosen(run_dir: Path) -> tuple[int | None, tuple[str, ...]]:
    found = choose_checkpoint(
        CheckpointDirectory(run_dir / "checkpoints"), JournalDirectory(run_dir / "journal")
    )
    return found.step, found.passed_over


def steps(run_dir: Path) -> list[int]:
    return CheckpointDirectory(run_dir / "checkpoints").steps()


def changed(path: Path, **fields: Any) -> None:
    """The document of a checkpoint says something else."""
    document = read_document(path) | fields
    seal(path, document)


def attached(path: Path, content: bytes) -> None:
    (path / "attachments" / GROUPS).write_bytes(content)
    changed(path)


def append_turn_out_of_order(run_dir: Path, step: int) -> None:
    journal = Journal(run_dir / "journal" / f"step-{step:06d}.jsonl")
    append(journal, "e0/p0/r0", 7, FIRST)
    journal.close()


def test_the_newest_checkpoint_is_chosen_where_everything_of_it_fits(run_dir: Path) -> None:
    newest = steps(run_dir)[-1]
    assert chosen(run_dir) == (newest, ())


def another_step(path: Path) -> None:
    changed(path, step=77)


def more_generated(path: Path) -> None:
    ledger = read_document(path)["ledger"]
    changed(path, ledger=ledger | {"generated": ledger["generated"] + 1})


def groups_of_another_format(path: Path) -> None:
    content = (path / "attachments" / GROUPS).read_bytes()
    attached(path, content.replace(b'"format":2', b'"format":99'))


MISFITS: dict[str, Callable[[Path], None]] = {
    "tokens generated": more_generated,
    "document is of step 77": another_step,
    "format 99": groups_of_another_format,
    "not as this version writes it": lambda path: attached(path, b"{\n"),
}


@pytest.mark.parametrize("said", MISFITS)
def test_a_newest_checkpoint_that_does_not_fit_is_passed_over_loudly_and_kept(
    run_dir: Path, said: str
) -> None:
    older, newest = steps(run_dir)
    MISFITS[said](run_dir / "checkpoints" / f"step-{newest:06d}")
    step, passed_over = chosen(run_dir)
    assert step == older
    (message,) = passed_over
    assert said in message
    assert f"step-{newest:06d}.rejected" in message
    assert (run_dir / "checkpoints" / f"step-{newest:06d}.rejected" / MARKER).exists()
    assert chosen(run_dir) == (older, ())


def test_a_turn_of_a_rollout_that_ended_before_the_checkpoint_does_not_spoil_it(
    run_dir: Path,
) -> None:
    """Item 1 of issue 12: `JournalError` at each resume of a checkpoint written like that."""
    _, newest = steps(run_dir)
    append_turn_out_of_order(run_dir, newest)
    assert chosen(run_dir) == (newest, ())


def test_where_no_checkpoint_fits_all_are_kept_and_it_is_said(run_dir: Path) -> None:
    before = steps(run_dir)
    for step in before:
        another_step(run_dir / "checkpoints" / f"step-{step:06d}")
    with pytest.raises(CheckpointError, match=r"document is of step 77.*document is of step 77"):
        chosen(run_dir)
    assert steps(run_dir) == before


def test_a_damaged_journal_costs_its_turns_and_no_checkpoint(run_dir: Path) -> None:
    _, newest = steps(run_dir)
    (run_dir / "journal" / f"step-{newest:06d}.jsonl").write_bytes(b"00000000 {}\n" * 3)
    step, (message,) = chosen(run_dir)
    assert step == newest
    assert "line is damaged" in message
    assert "sampled again" in message


def test_a_rejected_checkpoint_goes_when_a_newer_one_is_complete(run_dir: Path) -> None:
    directory = CheckpointDirectory(run_dir / "checkpoints")
    older, newest = steps(run_dir)
    rejected = directory.reject(directory.path(newest))
    directory.prune(keep=1)
    assert rejected.exists()
    path = directory.path(newest + 1)
    (directory.path(older)).rename(path)
    changed(path, step=newest + 1)
    directory.prune(keep=1)
    assert not rejected.exists()
    assert json.loads((path / MARKER).read_text())["step"] == newest + 1


def cut_short(path: Path) -> None:
    file = path / "attachments" / GROUPS
    file.write_bytes(file.read_bytes()[:-1])


def without_marker(path: Path) -> None:
    (path / MARKER).unlink()


def put_aside(path: Path) -> None:
    """As a run before this one did, which had an older one to go on from."""
    path.rename(path.with_name(path.name + ".torn"))


def tree(run_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", [cut_short, without_marker, put_aside])
def test_a_run_of_which_every_checkpoint_is_damaged_is_refused_and_nothing_is_changed(
    run_dir: Path, damage: Any
) -> None:
    directory = CheckpointDirectory(run_dir / "checkpoints")
    for step in steps(run_dir):
        damage(directory.path(step))
    (directory.root / "step-000009.writing").mkdir()
    (directory.root / "step-000009.writing" / "data").touch()
    before = tree(run_dir)
    with pytest.raises(CheckpointError) as refused:
        chosen(run_dir)
    message = str(refused.value)
    assert "\n" not in message
    assert "step-000002" in message
    assert "step-000003" in message
    assert "were not changed" in message
    assert "give another name" in message
    assert tree(run_dir) == before


def test_one_torn_and_one_that_does_not_fit_are_refused_together(run_dir: Path) -> None:
    older, newest = steps(run_dir)
    directory = CheckpointDirectory(run_dir / "checkpoints")
    cut_short(directory.path(newest))
    another_step(directory.path(older))
    before = tree(run_dir)
    with pytest.raises(CheckpointError, match=r"groups\.jsonl has .* bytes; .*is of step 77"):
        chosen(run_dir)
    assert tree(run_dir) == before


def test_a_run_killed_in_the_middle_of_its_first_checkpoint_goes_on_from_its_journal(
    run_dir: Path,
) -> None:
    directory = CheckpointDirectory(run_dir / "checkpoints")
    older, newest = steps(run_dir)
    shutil.rmtree(directory.path(newest))
    directory.path(older).rename(directory.root / "step-000001.writing")
    assert chosen(run_dir) == (None, ())
    assert list(directory.root.iterdir()) == []


def test_the_one_before_a_torn_second_checkpoint_of_a_step_is_gone_on_from(run_dir: Path) -> None:
    """Killed before what it replaces was removed, and its data were lost."""
    directory = CheckpointDirectory(run_dir / "checkpoints")
    _, newest = steps(run_dir)
    path = directory.path(newest)
    shutil.copytree(path, path.with_name(f"{path.name}.replaced"))
    cut_short(path)
    step, (message,) = chosen(run_dir)
    assert step == newest
    assert "groups.jsonl has" in message
    assert directory.steps()[-1] == newest
    assert path.with_name(f"{path.name}.torn").exists()


def test_a_journal_that_cannot_be_read_just_now_is_refused_and_nothing_is_changed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, newest = steps(run_dir)
    opened = Path.open

    def broken(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == run_dir / "journal" / f"step-{newest:06d}.jsonl":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *arguments, **options)

    before = tree(run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", broken)
        with pytest.raises(CheckpointError, match=r"journal of .* cannot be read: .*Input/output"):
            chosen(run_dir)
    assert tree(run_dir) == before
    assert chosen(run_dir) == (newest, ())
