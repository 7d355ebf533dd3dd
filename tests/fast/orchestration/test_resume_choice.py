"""Which checkpoint of a simulated run another one goes on from."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.simulation import Plan, Simulation
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.errors import CheckpointError, ConfigError
from torchtitan_rl.orchestration.checkpointing import (
    GROUPS,
    POSITION,
    choose_checkpoint,
    read_position,
)
from torchtitan_rl.orchestration.consumer import StopRequested
from torchtitan_rl.orchestration.journal import JOURNAL, Journal
from torchtitan_rl.rollout.records import to_bytes
from torchtitan_rl.training.checkpoint_files import (
    MARKER,
    seal,
)
from torchtitan_rl.training.checkpoints import CheckpointDirectory

PLAN = Plan(staleness=1, checkpoint_every=1, num_steps=6, turns=2, env_delay_s=5.0)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run that was stopped after step 3; checkpoints of steps 2 and 3 are there."""
    root = tmp_path_factory.mktemp("stopped")

    async def run() -> None:
        simulation = Simulation(PLAN, root)

        def record_step(record: Any) -> None:
            if record.step == 3:
                simulation.controller.request_stop()

        simulation.recorder.record_step = record_step  # type: ignore[method-assign]
        with pytest.raises(StopRequested):
            await simulation.run()

    run_virtually(run())
    return root


@pytest.fixture
def run_dir(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def chosen(run_dir: Path) -> tuple[int | None, tuple[str, ...]]:
    found = choose_checkpoint(
        CheckpointDirectory(run_dir / "checkpoints"), Journal(run_dir / JOURNAL)
    )
    return found.step, found.passed_over


def steps(run_dir: Path) -> list[int]:
    return CheckpointDirectory(run_dir / "checkpoints").steps()


def attached(path: Path, name: str, content: bytes) -> None:
    """An attachment of a checkpoint has another content."""
    (path / "attachments" / name).write_bytes(content)
    seal(path, {})


def changed(path: Path, **fields: Any) -> None:
    """The position in a checkpoint says something else."""
    attached(path, POSITION, to_bytes(replace(read_position(path), **fields)))


def another_step(path: Path) -> None:
    changed(path, step=77)


def more_generated(path: Path) -> None:
    ledger = dict(read_position(path).ledger)
    changed(path, ledger=ledger | {"generated": ledger["generated"] + 1})


MISFITS: dict[str, Callable[[Path], None]] = {
    "tokens generated": more_generated,
    "attachments are of step 77": another_step,
    "not as this version writes it": lambda path: attached(path, GROUPS, b"{\n"),
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


def test_a_checkpoint_of_the_format_before_is_refused_and_nothing_is_changed(run_dir: Path) -> None:
    newest = run_dir / "checkpoints" / f"step-{steps(run_dir)[-1]:06d}"
    (newest / "attachments" / POSITION).unlink()
    (newest / "attachments" / GROUPS).rename(newest / "attachments" / "groups.jsonl")
    seal(newest, {"extra": {"step": 3}})
    before = tree(run_dir)
    with pytest.raises(ConfigError, match=r"checkpoint\.resume: .* earlier version"):
        chosen(run_dir)
    assert tree(run_dir) == before


def test_a_damaged_journal_costs_its_turns_and_no_checkpoint(run_dir: Path) -> None:
    _, newest = steps(run_dir)
    (run_dir / JOURNAL).write_bytes(b"00000000 {}\n" * 3)
    step, (message,) = chosen(run_dir)
    assert step == newest
    assert "file is not a database" in message
    assert "sampled again" in message


def cut_short(path: Path) -> None:
    file = path / "attachments" / GROUPS
    file.write_bytes(file.read_bytes()[:-1])


def put_aside(path: Path) -> None:
    """As a run before this one did, which had an older one to go on from."""
    path.rename(path.with_name(path.name + ".rejected"))


def tree(run_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("damage", [cut_short, put_aside])
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
    assert f"{GROUPS} has" in message
    assert directory.steps()[-1] == newest
    assert path.with_name(f"{path.name}.rejected").exists()


def test_a_journal_that_cannot_be_read_just_now_is_refused_and_nothing_is_changed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, newest = steps(run_dir)
    connect = sqlite3.connect

    def broken(*arguments: Any, **options: Any) -> Any:
        connect(*arguments, **options).close()
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR
        raise error

    before = tree(run_dir)
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", broken)
        with pytest.raises(CheckpointError, match=r"journal of .* cannot be read: .*disk I/O"):
            chosen(run_dir)
    assert tree(run_dir) == before
    assert chosen(run_dir) == (newest, ())
