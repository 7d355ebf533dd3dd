"""Each script starts, by its module and by its path; runs under other options are never mixed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.options import keep_options


def test_runs_under_other_options_are_refused_by_name(tmp_path: Path) -> None:
    keep_options(tmp_path / "runs", {"steps": 10, "row_len": 64})
    keep_options(tmp_path / "runs", {"steps": 10, "row_len": 64})
    with pytest.raises(SystemExit, match="made with --row-len 64 instead of 32:"):
        keep_options(tmp_path / "runs", {"steps": 10, "row_len": 32})


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


SCRIPTS = sorted(
    path.stem
    for path in (Path(__file__).parents[3] / "benchmarks").glob("*.py")
    if "add_argument" in path.read_text() and "def main() -> " in path.read_text()
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_script_explains_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}")
