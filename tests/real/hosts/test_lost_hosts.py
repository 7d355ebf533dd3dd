"""Hosts that are cut off and come back, and controllers that are killed: with Monarch, without
engines. Whole runs: `test_runs_that_lose_hosts`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.real.hosts.harness import Host, HostProcess, make_hosts, namespaces_are_allowed, python

LOST_WITHIN_S = 15.0  # what users are promised; Monarch itself is quicker, in general
INCARNATION = "torchtitan_rl.backends.monarch.worker_loop"
SILENCE_S = 20.0  # of a quick worker, instead of 40 s


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)


class Scenario:
    """A worker on one host and a controller on another that watches it."""

    def __init__(self, root: Path, here: Host, there: Host, policy: Path) -> None:
        self.here, self.there, self.root, self.policy = here, there, root, policy
        self.folder = root / "run"
        self.folder.mkdir()
        self.port = 26600
        if namespaces_are_allowed():  # else they share the folder
            words = ["mount", "-t", "tmpfs", "tmpfs", str(self.folder)]
            assert there.start(words).wait(20) == 0
        self.worker = self._start_worker()

    def _start_worker(self) -> HostProcess:
        module = "tests.real.hosts.quick_worker"
        words = python("-m", module, self.address, str(SILENCE_S))
        worker = self.there.start(words, log=self.root / "worker.log")
        wait_until(lambda: "listening" in worker.text(), "the worker listens")
        return worker

    def start_worker_again(self) -> None:
        (self.root / "worker.log").unlink()
        self.worker = self._start_worker()

    @property
    def address(self) -> str:
        return f"tcp://{self.there.address}:{self.port}"

    def watch(
        self, seconds: float, *, log: str = "controller.log", port: int = 26700, losses: int = 1
    ) -> HostProcess:
        words = python(
            *("-m", "tests.real.hosts.watch_scenario", f"tcp://{self.here.address}:{port}"),
            *(self.address, str(self.policy), str(self.folder), str(seconds), str(losses)),
        )
        return self.here.start(words, log=self.root / log)

    def events(self) -> list[dict[str, Any]]:
        lines = (self.root / "controller.log").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def event(self, name: str) -> dict[str, Any] | None:
        return next((event for event in self.events() if event["event"] == name), None)

    def said(self) -> list[str]:
        return [event["line"] for event in self.events() if event["event"] == "said"]

    def num(self, name: str) -> int:
        return sum(event["event"] == name for event in self.events())

    def until_event(self, name: str) -> dict[str, Any]:
        wait_until(lambda: self.event(name) is not None, f"{name}: {self.events()}")
        event = self.event(name)
        assert event is not None
        return event

    def incarnation(self) -> psutil.Process:
        """The process of the worker that serves a run."""
        return next(one for one in self.there.processes() if INCARNATION in one.cmdline())

    def runs_there(self) -> list[psutil.Process]:
        """What the run has started on the worker's host."""
        return [
            process
            for process in self.there.processes()
            if "bootstrap_main" in " ".join(process.cmdline())
        ]


@contextmanager
def scenario(root: Path, policy: Path) -> Iterator[Scenario]:
    with make_hosts(2) as (here, there):
        yield Scenario(root, here, there, policy)


@pytest.mark.soak
@pytest.mark.skipif(
    not namespaces_are_allowed(), reason="a stopped process does not know that it was not heard"
)
def test_a_host_that_is_cut_off_is_lost_and_comes_back_and_its_files_are_brought(
    tmp_path, checkpoint
):
    with scenario(tmp_path, checkpoint) as run:
        controller = run.watch(300)
        run.until_event("spawned")
        cut_s = time.monotonic()
        run.there.cut()
        run.until_event("lost")
        assert time.monotonic() - cut_s < LOST_WITHIN_S + 5  # of a busy machine
        time.sleep(SILENCE_S)
        run.there.restore()
        run.until_event("back")
        assert controller.wait(120) == 0, controller.text()[-3000:]
        assert run.until_event("left")
        assert "host0 is back" in run.said()
        assert set(re.findall("worker: listening on (.+)", run.worker.text())) == {run.address}
        assert "nothing was heard from the controller" in run.worker.text()
        wait_until(lambda: run.runs_there() == [], "the worker ends what the run left")
        for name in ("replica0", "replica0-2"):
            log = run.folder / "logs" / f"host0-{name}-rank0.log"
            assert f"{name} runs" in log.read_text()
        clocks = json.loads((run.folder / "traces" / "clocks.json").read_text())
        assert abs(clocks["host0"]["ahead_ns"]) <= 10**8  # it is the same clock
        assert run.worker.is_running


@pytest.mark.soak
def test_a_host_whose_first_attachment_fails_is_taken_back_by_a_later_one(tmp_path, checkpoint):
    with scenario(tmp_path, checkpoint) as run:
        controller = run.watch(300)
        run.until_event("spawned")
        run.incarnation().kill()
        wait_until(lambda: run.worker.text().count("listening on") == 2, "the next one listens")
        process = run.incarnation()
        process.suspend()  # it accepts connections, and says nothing
        failed = "host0 listens again, and was not attached (no answer)"
        wait_until(lambda: any(failed in line for line in run.said()), "the first attempt fails")
        process.resume()
        run.until_event("back")
        assert controller.wait(120) == 0, controller.text()[-3000:]


@pytest.mark.soak
@pytest.mark.parametrize("away_s", [0.0, 45.0])
def test_a_worker_that_was_killed_and_is_started_again_is_taken_back(tmp_path, checkpoint, away_s):
    with scenario(tmp_path, checkpoint) as run:
        controller = run.watch(300)
        run.until_event("spawned")
        run.worker.signal(9)
        run.worker.wait(20)
        wait_until(lambda: run.runs_there() == [], "what it has started ends with it")
        time.sleep(away_s)
        run.start_worker_again()
        run.until_event("back")
        assert controller.wait(120) == 0, controller.text()[-3000:]


@pytest.mark.soak
def test_a_host_is_taken_back_however_often_it_is_lost(tmp_path, checkpoint):
    losses = 20
    with scenario(tmp_path, checkpoint) as run:
        controller = run.watch(1200, losses=losses)
        for number in range(losses):
            num_spawned = number + 1
            wait_until(lambda: run.num("spawned") == num_spawned, f"{run.events()}")  # noqa: B023
            run.incarnation().kill()
        assert controller.wait(120) == 0, controller.text()[-3000:]
        assert run.num("back") == losses


@pytest.mark.soak
def test_processes_on_another_host_do_not_outlive_a_killed_controller(tmp_path, checkpoint):
    """And the next run, which waits for the worker, uses it then."""
    with scenario(tmp_path, checkpoint) as run:
        controller = run.watch(300)
        run.until_event("spawned")
        assert len(run.runs_there()) == 2  # the agent, and replica0
        other = run.watch(1, log="other.log", port=26701)
        wait_until(lambda: "waiting for workers" in other.text(), "the other one is refused")
        wait_until(lambda: len(run.runs_there()) == 2, "the other one's agent has ended")
        assert run.event("lost") is None
        controller.signal(9)
        assert controller.wait(20) == -9
        assert other.wait(120) == 0, other.text()[-3000:]
        assert "nothing was heard from the controller" in run.worker.text()
        wait_until(lambda: run.runs_there() == [], "they end")
