"""Processes that end whatever state they are in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import torchtitan_rl.processes
from torchtitan_rl.errors import ProcessEndedError, ProcessLostError, ProcessStoppedError
from torchtitan_rl.processes import MARK_VARIABLE, Processes, hold_marked

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


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchtitan_rl.processes, "LOOK_S", 0.02)
    monkeypatch.setattr(torchtitan_rl.processes, "STOPPED_S", 0.2)


@pytest.mark.usefixtures("quick_looks")
@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGKILL, ProcessEndedError), (signal.SIGSTOP, ProcessStoppedError)],
)
def test_one_that_ends_or_is_stopped_is_seen(
    child: subprocess.Popen[str], number: int, error: type[ProcessLostError]
) -> None:
    async def watch() -> None:
        watching = asyncio.create_task(
            Processes((os.getpid(), child.pid)).wait_until_lost("replica0")
        )
        await asyncio.sleep(0.1)
        child.send_signal(number)
        with pytest.raises(error, match=f"replica0: process {child.pid}") as raised:
            await asyncio.wait_for(watching, 30.0)
        assert raised.value.silent_s
        assert child.wait(30) == -signal.SIGKILL

    asyncio.run(watch())


@pytest.mark.usefixtures("quick_looks")
def test_the_watch_over_processes_that_were_ended_ends(child: subprocess.Popen[str]) -> None:
    async def watch() -> None:
        processes = Processes((child.pid,))
        watching = asyncio.create_task(processes.wait_until_lost("replica0"))
        await processes.end(0.0)
        with pytest.raises(ProcessEndedError):
            await asyncio.wait_for(watching, 30.0)

    asyncio.run(watch())


def test_processes_are_found_by_their_mark_without_their_own_children_once_all_are_there() -> None:
    def start(mark: str) -> subprocess.Popen[str]:
        command = ["/bin/sh", "-c", "sleep 600; true"]
        marked = os.environ | {MARK_VARIABLE: mark}
        return subprocess.Popen(command, env=marked, text=True, process_group=0)

    async def check() -> None:
        children = [start("a"), start("b")]
        try:
            finding = asyncio.create_task(hold_marked(os.getpid(), "a", 2))
            await asyncio.sleep(0.2)
            assert not finding.done()
            children.append(start("a"))
            found = await asyncio.wait_for(finding, 30.0)
            await found.end(0.1)
            assert [one.wait(30) for one in children[::2]] == [-signal.SIGKILL] * 2
            assert children[1].poll() is None
        finally:
            for one in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(one.pid, signal.SIGKILL)
                one.wait()

    asyncio.run(check())


@pytest.mark.usefixtures("quick_looks")
def test_one_that_is_slowed_down_by_many_short_stops_is_not_lost(
    child: subprocess.Popen[str],
) -> None:
    async def watch() -> None:
        watching = asyncio.create_task(Processes((child.pid,)).wait_until_lost("replica0"))
        for _ in range(8):
            child.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.09)
            child.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.005)
        assert not watching.done()
        watching.cancel()

    asyncio.run(watch())


@pytest.mark.usefixtures("quick_looks")
def test_one_that_goes_on_after_this_process_was_stopped_as_well_is_not_lost(
    child: subprocess.Popen[str],
) -> None:
    async def watch() -> None:
        watching = asyncio.create_task(Processes((child.pid,)).wait_until_lost("replica0"))
        await asyncio.sleep(0.1)
        child.send_signal(signal.SIGSTOP)
        time.sleep(0.5)  # as in a laptop that was suspended
        await asyncio.sleep(0.03)  # it is seen stopped
        child.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.4)
        assert not watching.done()
        watching.cancel()

    asyncio.run(watch())
