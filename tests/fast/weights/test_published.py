"""Which published versions are released."""

from __future__ import annotations

import doctest

from torchtitan_rl.weights import handle


def test_all_versions_but_the_newest_and_the_kept_ones_are_released() -> None:
    assert doctest.testmod(handle) == (0, 1)  # failed, attempted
