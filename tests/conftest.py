"""Property tests draw the same cases each time, so that a failure is the same on every machine;
with ``HYPOTHESIS_PROFILE=explore``, as in `make soak`, they draw new ones. No test fails for the
time it takes on a busy machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Before a library reads it on import: without a network each try to reach the hub takes 20 s.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

ROOT = Path(__file__).parent
SHARING = ROOT / "real" / "own_server"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process of pytest-xdist runs all tests of a file, or of a folder that shares what it
    starts."""
    for item in items:
        place = SHARING if SHARING in item.path.parents else item.path
        item.add_marker(pytest.mark.xdist_group(str(place.relative_to(ROOT))))
