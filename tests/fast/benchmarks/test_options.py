"""Options that cannot be measured with are refused, and runs under others are never mixed."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.options import at_least, core, keep_options


def test_numbers_below_the_smallest_and_missing_cores_are_refused() -> None:
    assert at_least(5)("5") == 5
    with pytest.raises(argparse.ArgumentTypeError, match="4 is less than 5"):
        at_least(5)("4")
    first = min(os.sched_getaffinity(0))
    assert core(str(first)) == first
    with pytest.raises(argparse.ArgumentTypeError, match="core 99999 is none of this process"):
        core("99999")


def test_runs_under_other_options_are_refused_by_name(tmp_path: Path) -> None:
    keep_options(tmp_path / "runs", {"steps": 10, "row_len": 64})
    keep_options(tmp_path / "runs", {"steps": 10, "row_len": 64})
    with pytest.raises(SystemExit, match="made with --row-len 64 instead of 32:"):
        keep_options(tmp_path / "runs", {"steps": 10, "row_len": 32})


def test_runs_under_unknown_options_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trl.json").write_text("{}")
    with pytest.raises(SystemExit, match="files but no options"):
        keep_options(tmp_path, {"steps": 10})
    assert [path.name for path in tmp_path.iterdir()] == ["trl.json"]


def test_a_script_runs_by_its_path_as_well_from_any_directory(tmp_path: Path) -> None:
    """It imports others of its folder, and of the tests."""
    script = Path(__file__).parents[3] / "benchmarks" / "router.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(script), "--help"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: router.py")
