"""Property tests draw the same cases each time, so that a failure is the same on every machine;
with ``HYPOTHESIS_PROFILE=explore``, as in `make soak`, they draw new ones. No test fails for the
time it takes on a busy machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

# Before a library reads it on import: without a network each try to reach the hub takes 20 s.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

SHARING = "tests/real/own_server/"


class ByFile(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """One process runs all tests of a file, or of a folder that shares what it starts."""

    def _split_scope(self, nodeid: str) -> str:
        return SHARING if nodeid.startswith(SHARING) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """torch has one default group in a process: a file that leaves one fails another file's
    tests, which depends on the files that this process of pytest-xdist got."""
    yield
    if distributed := sys.modules.get("torch.distributed"):
        assert not distributed.is_initialized()
