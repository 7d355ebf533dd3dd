"""Each script starts, by its module and by its path; runs under other options are never mixed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from benchmarks.options import keep_options


def test_runs_under_other_options_are_refused_by_name(tmp_path: Path) -> None:
    keep_options(tmp_path / "runs", {"steps": 10, "row_len": 64})
    keep_options(tmp_path / "runs", {"steps": 10, "row_len": 64})
    with pytest.raises(SystemExit, match="made with --row-len 64 instead of 32:"):
        keep_options(tmp_path / "runs", {"steps": 10, "row_len": 32})


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
