"""vLLM's own server and ours over one tiny model, for all files of this folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.real.runs import ROOT, TIMEOUT_S


@pytest.fixture(scope="package")
def openai_scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What `tests.real.openai_scenario` prints; it serves until the last test of the folder."""
    root = tmp_path_factory.mktemp("openai")
    with (
        open(root / "log", "w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "tests.real.openai_scenario", str(root)],
            cwd=ROOT,
            # A preloaded OpenMP counts its threads before Python starts.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("{")), None)
        assert line is not None, (root / "log").read_text()[-3000:]
        yield json.loads(line)
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 0, (root / "log").read_text()[-3000:]
