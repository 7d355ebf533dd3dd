"""A fixture for tests that score in the sandbox."""

from __future__ import annotations

import pytest

from torchtitan_rl.sandbox.sandbox import SandboxConfig


@pytest.fixture(scope="session")
def sandboxed() -> None:
    if errors := SandboxConfig().errors("sandbox"):
        pytest.skip(errors[0])
