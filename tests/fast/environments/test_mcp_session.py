"""When the processes of MCP servers start. These servers read, and never list their tools."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

import psutil
import pytest

from tests.support.async_tests import on_event_loop
from torchtitan_rl.environments.mcp import McpServer, McpSession

pytest.importorskip("mcp")

DEAF = ("sh", "-c", "while read line; do :; done")
AT_ONCE = 2 * len(os.sched_getaffinity(0))


@on_event_loop
async def test_two_servers_per_core_start_at_once_and_the_wait_for_that_does_not_count() -> None:
    server = McpServer(command=DEAF, start_timeout_s=0.5)
    sessions = [McpSession(str(number), server) for number in range(AT_ONCE + 2)]
    starts = [asyncio.create_task(session.start()) for session in sessions]
    most = 0
    while not all(start.done() for start in starts):
        await asyncio.sleep(0.02)
        most = max(most, num_processes())
    errors = await asyncio.gather(*starts, return_exceptions=True)
    assert all("no list of tools after 0.5 s" in str(error) for error in errors)
    await asyncio.gather(*(session.close() for session in sessions))
    assert most == AT_ONCE
    assert num_processes() == 0


def num_processes() -> int:
    """Servers that this process started: of each, the shim."""
    found = 0
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found += DEAF[-1] in child.cmdline()
    return found
