"""What several files of whole runs share, and deadlines that a busy machine keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real.models import tiny_model
from tests.real.runs import ROOT, require_audit, train

HERE = Path(__file__).parent
TIMEOUT_S = 1800.0  # of a test with its fixtures; each start of a process takes seconds
NUM_STEPS = 6


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny policy with a tied head."""
    return tiny_model(tmp_path_factory.mktemp("policy") / "tied")


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an uninterrupted synchronous run, that others must equal."""
    root = tmp_path_factory.mktemp("whole")
    run_dir = train(root, "whole", "--num-steps", str(NUM_STEPS))
    require_audit(run_dir)
    return run_dir


@pytest.fixture(scope="session")
def openai_scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What `tests.real.openai_scenario` prints; it serves until the last test."""
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
