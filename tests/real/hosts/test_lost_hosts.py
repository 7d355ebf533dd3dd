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
from torchtitan_rl.launch.workers import CONTROLLER_LOST_S, HOST_LOST_S, life_addresses

LOST_WITHIN_S = 15.0  # what users are promised; Monarch itself is quicker, in general
LIFE = "torchtitan_rl.backends.monarch.worker_loop"
BACK = "host0 is back, at "
SILENCE_S = 8.0  # of a quick worker, instead of CONTROLLER_LOST_S


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
        words = python("-m", module, self.address, str(self.root / "memory"), str(SILENCE_S))
        worker = self.there.start(words, log=self.root / "worker.log")
        wait_until(lambda: "listening" in worker.text(), "the worker listens")
        return worker

    def start_worker_without_memory(self) -> None:
        """As in a container that is made anew."""
        (self.root / "memory").unlink()
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

    def life(self) -> psutil.Process:
        """The process of the worker's life."""
        return next(one for one in self.there.processes() if LIFE in one.cmdline())

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
        (at,) = [line.removeprefix(BACK) for line in run.said() if line.startswith(BACK)]
        assert at in life_addresses(run.address)[1:]  # which of them depends on the machine
        lives = re.findall("worker: listening on (.+)", run.worker.text())
        assert lives[0] == run.address
        assert at in lives[1:]
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
        run.life().kill()
        wait_until(lambda: ":26601" in run.worker.text(), "the next life listens")
        life = run.life()
        life.suspend()  # it accepts connections, and says nothing
        address = f"tcp://{run.there.address}:26601"
        failed = f"host0 listens again, and it was not attached at {address} (no answer)"
        wait_until(lambda: any(failed in line for line in run.said()), "the first attempt fails")
        life.resume()
        run.until_event("back")
        assert controller.wait(120) == 0, controller.text()[-3000:]


@pytest.mark.soak
def test_a_worker_that_was_killed_and_begins_again_at_its_first_port_is_taken_back(
    tmp_path, checkpoint
):
    with scenario(tmp_path, checkpoint) as run:
        controller = run.watch(300)
        run.until_event("spawned")
        run.worker.signal(9)
        run.worker.wait(20)
        wait_until(lambda: run.runs_there() == [], "what it has started ends with it")
        run.start_worker_without_memory()
        run.until_event("back")
        assert controller.wait(120) == 0, controller.text()[-3000:]
        assert f"host0 is back, at {run.address}" in run.said()


@pytest.mark.soak
def test_a_host_is_taken_back_however_often_it_is_lost(tmp_path, checkpoint):
    losses = 20
    with scenario(tmp_path, checkpoint) as run:
        controller = run.watch(1200, losses=losses)
        for number in range(losses):
            num_spawned = number + 1
            wait_until(lambda: run.num("spawned") == num_spawned, f"{run.events()}")  # noqa: B023
            run.life().kill()
        assert controller.wait(120) == 0, controller.text()[-3000:]
        assert run.num("back") == losses


@pytest.mark.soak
def test_processes_on_another_host_do_not_outlive_a_killed_controller(tmp_path, checkpoint):
    with scenario(tmp_path, checkpoint) as run:
        controller = run.watch(300)
        run.until_event("spawned")
        assert len(run.runs_there()) == 2  # the agent, and replica0
        other = run.watch(1, log="other.log", port=26701)
        assert other.wait(120) == 1
        assert "serves another run" in other.text()
        wait_until(lambda: len(run.runs_there()) == 2, "the other one's agent has ended")
        time.sleep(5.0)
        assert run.event("lost") is None
        controller.signal(9)
        assert controller.wait(20) == -9
        wait_until(lambda: run.runs_there() == [], "they end")
        (tmp_path / "controller.log").unlink()
        assert run.watch(1).wait(120) == 0, "the next run uses the worker"
        assert run.event("attached") == {
            "event": "attached",
            "at_s": run.until_event("attached")["at_s"],
            "lives": {run.address: f"tcp://{run.there.address}:26601"},
        }


def test_the_limits_are_what_users_are_promised():
    assert HOST_LOST_S < LOST_WITHIN_S
    assert CONTROLLER_LOST_S < 60
