"""Processes that end whatever state they are in."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from torchtitan_rl.processes import Processes

SLEEPS = "import time; print('ready', flush=True); time.sleep(600)"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_stopped_process_does_not_end_by_itself_and_is_killed(
    child: subprocess.Popen[str],
) -> None:
    processes = Processes([child.pid])
    os.kill(child.pid, signal.SIGSTOP)
    assert asyncio.run(processes.end(0.1)) == [child.pid]
    assert child.wait() == -signal.SIGKILL


def test_one_that_has_exited_is_not_killed_again_whoever_has_its_number(
    child: subprocess.Popen[str],
) -> None:
    processes = Processes([child.pid])
    child.kill()
    child.wait()
    assert asyncio.run(processes.end(0.1)) == []
