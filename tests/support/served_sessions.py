"""Sessions for tests, and refusals as pairs."""

from __future__ import annotations

import pytest

from tests.support.agents import TokenRouter
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.sessions import Sessions

TIMEOUT_S = 60.0


def make(router: TokenRouter | None = None, **options) -> Sessions:
    return Sessions(router or TokenRouter(), **{"timeout_s": TIMEOUT_S, **options})


async def refused(work) -> tuple[int, str]:
    with pytest.raises(RefusedError) as caught:
        await work
    return caught.value.status, caught.value.code


CLOSED = (400, "session_closed")
