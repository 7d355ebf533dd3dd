"""Incarnations of a worker, with small processes instead of Monarch's, and what counts as
silence."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from torchtitan_rl.launch.workers import BEAT_S, Heartbeat
from torchtitan_rl.weights.shm_cleanup import GUARD_NAME

ROOT = Path(__file__).parents[3]

WORKER = """
import sys
from torchtitan_rl.launch.workers import WorkerSupervisor, stopped_by_signals

supervisor = WorkerSupervisor(
    [sys.executable, "-c", sys.argv[1]],
    say=lambda line: print(line, flush=True),
    silence_s=1.5,
    end_s=float(sys.argv[2]),
)
with stopped_by_signals(supervisor):
    code = supervisor.run()
    print("was left:", supervisor.was_left, flush=True)
    sys.exit(code)
"""

# An incarnation: says that it runs, starts a process in a session of its own, one that loses its
# parent, and does as it is told.
INCARNATION = """
import os, subprocess, sys, time
from torchtitan_rl.launch.workers import claim_incarnation, is_leaving, record_beat, record_run_end
subprocess.Popen(["sh", "-c", "sleep 1000 & setsid sleep 1000 &"]).wait()
print("serves", claim_incarnation(), claim_incarnation(), flush=True)
{}
"""


class Worker:
    def __init__(self, does: str, log: Path, *, end_s: float = 30.0) -> None:
        self.log = log
        words = [sys.executable, "-c", WORKER, INCARNATION.format(does), str(end_s)]
        with log.open("w") as output:
            self.process = subprocess.Popen(
                words, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output, stderr=output
            )

    def until(self, number: int) -> str:
        """What it has printed once ``number`` incarnations have begun."""
        deadline_s = time.monotonic() + 60
        while self.log.read_text().count("serves") < number:
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.05)
        return self.log.read_text()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture
def start(tmp_path):
    started = []

    def start_worker(does: str, **options: Any) -> Worker:
        started.append(Worker(does, tmp_path / "log", **options))
        return started[-1]

    yield start_worker
    for worker in started:
        worker.stop()


def test_an_incarnation_whose_controller_is_silent_ends_with_all_its_processes(start):
    worker = start("record_beat()\ntime.sleep(1000)")
    text = worker.until(1)
    assert "serves True False" in text  # for one run alone
    first = worker.descendants()
    assert len(first) == 3
    text = worker.until(2)
    assert "nothing was heard from the controller for" in text
    assert not [process for process in first if process.is_running()]
    assert worker.stop(signal.SIGTERM) == 0  # the second one is cut off, too
    assert "was left: False" in worker.log.read_text()


def test_an_incarnation_waits_for_its_first_controller_and_leaves_nothing_when_it_is_stopped(start):
    worker = start("time.sleep(1000)")
    worker.until(1)
    time.sleep(2.5)
    assert worker.log.read_text().count("serves") == 1
    processes = worker.descendants()
    assert worker.stop(signal.SIGTERM) == 0
    assert not [process for process in processes if process.is_running()]
    assert "was left: True" in worker.log.read_text()


def test_beats_keep_an_incarnation_until_its_run_has_ended(start):
    worker = start(
        "for _ in range(15): record_beat(); time.sleep(0.2)\nrecord_run_end()\ntime.sleep(1000)"
    )
    text = worker.until(2)
    assert "the run has ended; its processes have ended" in text
    assert "nothing was heard" not in text


def test_a_worker_that_shall_leave_ends_when_its_run_has_left(start):
    beats = "while not is_leaving(): record_beat(); time.sleep(0.1)\nprint('told', flush=True)\n"
    worker = start(f"{beats}record_run_end()\ntime.sleep(1000)")
    worker.until(1)
    processes = worker.descendants()
    assert worker.stop(signal.SIGTERM) == 0
    assert not [process for process in processes if process.is_running()]
    text = worker.log.read_text()
    assert text.count("serves") == text.count("told\n") == 1
    assert "was left: True" in text


def test_a_process_that_does_not_end_is_named_and_holds_up_no_other_incarnation(start):
    # A guard is not killed at once: that is as if the kernel did not end it.
    words = [sys.executable, "-c", "import time; time.sleep(10)", GUARD_NAME]
    does = f"print('pid', subprocess.Popen({words}).pid, flush=True)\nrecord_run_end()"
    worker = start(f"{does}\ntime.sleep(1000)", end_s=1.0)
    text = worker.until(2)
    pid = re.findall(r"^pid (\d+)", text, re.MULTILINE)[0]
    assert f"processes that were killed do not end: {pid}\n" in text


def test_a_listener_that_stood_still_does_not_count_that_as_silence():
    heartbeat = Heartbeat(0.0)
    heartbeat.look(1.0, "beat")
    assert heartbeat.look(3601.0, "beat") <= 2 * BEAT_S
    assert heartbeat.look(3602.0, "next beat") == 0


def test_a_worker_that_is_not_ours_serves_one_run_until_its_agent_has_ended():
    claim = "from torchtitan_rl.launch.workers import claim_incarnation as claim"
    words = [sys.executable, "-c", f"{claim}; print(claim(), flush=True); input()"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen(words, **pipes) as first:
        assert first.stdout.readline() == "True\n"
        with subprocess.Popen(words, **pipes) as second:
            assert second.communicate("\n")[0] == "False\n"
        first.kill()
    with subprocess.Popen(words, **pipes) as last:
        assert last.communicate("\n")[0] == "True\n"
