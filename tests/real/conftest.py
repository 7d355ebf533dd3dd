"""What several files of whole runs share, and deadlines that a busy machine keeps."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from tests.real.models import tiny_model
from tests.real.runs import require_audit, train

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
    """The directory of an uninterrupted synchronous run, that others must equal. The processes of
    pytest-xdist share it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    with (root / "whole.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (root / "whole" / "policy").exists():
            require_audit(train(root, "whole", "--num-steps", str(NUM_STEPS)))
    return root / "whole"
