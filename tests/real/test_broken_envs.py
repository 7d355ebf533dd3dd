"""Environments that hang, raise, return garbage or are always solved, in whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.runs import ROOT, Run, read_metrics

CONFIG = ROOT / "tests" / "real" / "broken_envs.py"


def start(root: Path, *options: str) -> Run:
    place = ("--output-dir", str(root), "--name", "run", "--metrics.progress", "plain")
    return Run([str(CONFIG), *place, *options], log=root / "log")


def test_a_run_goes_on_alongside_environments_that_hang_raise_or_return_garbage(
    tmp_path: Path,
) -> None:
    run = start(tmp_path, "--schedule.staleness", "1")
    run.require_success()
    rows = [row for row in read_metrics(tmp_path / "run") if "train/reward_mean" in row]
    assert len(rows) == 2
    for row in rows:
        assert row["train/ended_completed"] == 8  # fine and solved
        assert row["train/ended_step_timeout"] == 4
        assert row["train/ended_env_error"] == 8  # raises and garbage
        assert row["tokens/discarded/step_timeout"] > 0
        assert row["tokens/discarded/env_error"] > 0


@pytest.mark.soak
def test_trap_19_a_run_whose_problems_are_all_solved_ends_with_a_message_where_they_are_skipped(
    tmp_path: Path,
) -> None:
    """As tests/fast/orchestration/test_controller.py shows with simulated parts."""
    run = start(tmp_path, "--task.kinds", "solved", "--schedule.zero-variance", "skip")
    assert run.wait() == 1
    assert "rewards that do not differ" in run.log.read_text()
    assert run.left_behind() == []
