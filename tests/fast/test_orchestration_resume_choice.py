"""Which checkpoint of a simulated run another one goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fast.simulation import Plan, Simulation
from tests.fast.test_orchestration_journal import FIRST
from tests.fast.virtual_clock import run_virtually
from torchtitan_rl.errors import CheckpointError
from torchtitan_rl.orchestration.consumer import StopRequested
from torchtitan_rl.orchestration.journal import Journal
from torchtitan_rl.orchestration.journal_directory import JournalDirectory
from torchtitan_rl.orchestration.resume_choice import GROUPS, choose_checkpoint
from torchtitan_rl.training.checkpoint_files import (
    MARKER,
    fingerprint,
    list_files,
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
    seal(path, document, {name: fingerprint(path / name) for name in list_files(path)})


def attached(path: Path, content: bytes) -> None:
    (path / "attachments" / GROUPS).write_bytes(content)
    changed(path)


def append_turn_out_of_order(run_dir: Path, step: int) -> None:
    journal = Journal(run_dir / "journal" / f"step-{step:06d}.jsonl")
    journal.append("e0/p0/r0", 7, FIRST, None)
    journal.close()


def test_the_newest_checkpoint_is_chosen_where_everything_of_it_fits(run_dir: Path) -> None:
    newest = steps(run_dir)[-1]
    assert chosen(run_dir) == (newest, ())


def ledger_that_does_not_add_up(run_dir: Path, path: Path) -> None:
    ledger = read_document(path)["ledger"]
    changed(path, ledger=ledger | {"generated": ledger["generated"] + 1})


def another_step(run_dir: Path, path: Path) -> None:
    changed(path, step=77)


def groups_of_another_format(run_dir: Path, path: Path) -> None:
    content = (path / "attachments" / GROUPS).read_bytes()
    attached(path, content.replace(b'"format":2', b'"format":99'))


def groups_that_are_no_json(run_dir: Path, path: Path) -> None:
    attached(path, b"{\n")


def damaged_journal(run_dir: Path, path: Path) -> None:
    file = run_dir / "journal" / f"{path.name}.jsonl"
    file.write_bytes(b"00000000 {}\n" * 3)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (ledger_that_does_not_add_up, "tokens generated"),
        (another_step, "document is of step 77"),
        (groups_of_another_format, "format 99"),
        (groups_that_are_no_json, "not as this version writes it"),
    ],
)
def test_a_newest_checkpoint_that_does_not_fit_is_passed_over_loudly_and_kept(
    run_dir: Path, damage: Any, said: str
) -> None:
    older, newest = steps(run_dir)
    damage(run_dir, run_dir / "checkpoints" / f"step-{newest:06d}")
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
        another_step(run_dir, run_dir / "checkpoints" / f"step-{step:06d}")
    with pytest.raises(CheckpointError, match=r"document is of step 77.*document is of step 77"):
        chosen(run_dir)
    assert steps(run_dir) == before


def test_a_damaged_journal_costs_its_turns_and_no_checkpoint(run_dir: Path) -> None:
    _, newest = steps(run_dir)
    damaged_journal(run_dir, run_dir / "checkpoints" / f"step-{newest:06d}")
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
