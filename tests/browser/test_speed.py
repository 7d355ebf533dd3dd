"""The benchmark of the page's speed, with its smallest settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.real.runs import ROOT

pytestmark = pytest.mark.soak


def test_the_benchmark_measures_every_view(browser: Any, tmp_path: Path) -> None:
    output = tmp_path / "page.json"
    words = [sys.executable, "-m", "benchmarks.page_browser", "--steps", "5", "--rollouts", "5"]
    subprocess.run([*words, "--repeats", "1", "--output", str(output)], cwd=ROOT, check=True)
    figures = json.loads(output.read_text())["figures"]
    assert len(figures) > 10
    assert all(0 < value < 60_000 for value in figures.values())
