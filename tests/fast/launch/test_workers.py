"""Lives of a worker, with small processes instead of Monarch's; when they are given up; where a
lost host is attached again; what counts as silence."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from torchtitan_rl.launch.workers import (
    BEAT_S,
    Attempts,
    Heartbeat,
    Patience,
    life_addresses,
)
from torchtitan_rl.weights.shm_cleanup import GUARD_NAME

ROOT = Path(__file__).parents[3]
ADDRESS = "tcp://127.0.0.2:26600"

WORKER = """
import sys
from pathlib import Path
from torchtitan_rl.launch.workers import WorkerSupervisor, stopped_by_signals

lives = WorkerSupervisor(
    lambda address: [sys.executable, "-c", sys.argv[1], address],
    sys.argv[2],
    memory=Path(sys.argv[3]),
    say=lambda line: print(line, flush=True),
    silence_s=float(sys.argv[5]),
    unused_s=1.0,
    end_s=float(sys.argv[4]),
)
with stopped_by_signals(lives):
    sys.exit(lives.run())
"""

# A life: says that it runs, starts a process in a session of its own, one that loses its parent,
# and does as it is told.
LIFE = """
import os, subprocess, sys, time
from torchtitan_rl.launch.workers import note_beat, note_run_end
subprocess.Popen(["sh", "-c", "sleep 1000 & setsid sleep 1000 &"]).wait()
print("lives at", sys.argv[1], os.getpid(), flush=True)
{}
"""
BEATS = "note_beat(); time.sleep(0.2)\n"


class Worker:
    def __init__(
        self,
        life: str,
        log: Path,
        *,
        end_s: float = 30.0,
        silence_s: float = 1.5,
        memory: int | None = None,
        starter: Sequence[str] = (),
    ) -> None:
        self.log = log
        self.memory = log.with_suffix(".memory")
        if memory is not None:
            self.memory.write_text(str(memory))
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [
                    *starter,
                    sys.executable,
                    "-c",
                    WORKER,
                    LIFE.format(life),
                    ADDRESS,
                    str(self.memory),
                    str(end_s),
                    str(silence_s),
                ],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=output,
            )

    def until(self, condition: Callable[[str], bool]) -> str:
        deadline_s = time.monotonic() + 60
        while not condition(self.log.read_text()):
            assert time.monotonic() < deadline_s, self.log.read_text()
            time.sleep(0.05)
        return self.log.read_text()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture
def start(tmp_path):
    started = []

    def start_worker(life: str, **options: Any) -> Worker:
        started.append(Worker(life, tmp_path / "log", **options))
        return started[-1]

    yield start_worker
    for worker in started:
        worker.stop()


def addresses(text: str) -> list[str]:
    return re.findall(r"lives at (\S+)", text)


def test_without_a_beat_after_the_first_all_processes_of_a_life_end_and_the_next_has_another_port(
    start,
):
    worker = start("note_beat()\ntime.sleep(1000)")
    worker.until(lambda text: "lives at" in text)
    first = worker.descendants()
    assert len(first) == 3
    text = worker.until(lambda text: len(addresses(text)) >= 2)  # more, on a busy machine
    assert addresses(text)[:2] == [ADDRESS, "tcp://127.0.0.2:26601"]
    assert "nothing was heard from the controller for" in text
    assert not [process for process in first if process.is_running()]


def test_after_a_lost_run_a_life_that_nobody_uses_is_given_up_for_the_next_port(start):
    used = f"if sys.argv[1] == {ADDRESS!r}: note_beat()\n"
    worker = start(f"{used}time.sleep(1000)")
    text = worker.until(lambda text: len(addresses(text)) >= 4)
    assert addresses(text)[:4] == list(life_addresses(ADDRESS)[:4])
    assert text.count("the run that was lost did not come back for ") >= 2
    worker.stop()
    again = start("time.sleep(1000)", memory=99)
    text = again.until(lambda text: len(addresses(text)) == 2)
    assert addresses(text) == ["tcp://127.0.0.2:26699", ADDRESS]
    assert again.memory.read_text() == "0"


def test_beats_keep_a_life_and_its_run_s_end_gives_the_next_one_the_same_port(start):
    worker = start(f"for _ in range(15): {BEATS}note_run_end()\ntime.sleep(1000)")
    text = worker.until(lambda text: len(addresses(text)) == 2)
    assert addresses(text) == [ADDRESS, ADDRESS]
    assert "the run has ended" in text


def test_a_worker_that_is_stopped_leaves_no_process(start):
    worker = start("note_beat()\ntime.sleep(1000)")
    worker.until(lambda text: "lives at" in text)
    processes = worker.descendants()
    assert worker.stop() == 0
    assert not [process for process in processes if process.is_running()]


def test_a_process_that_does_not_end_is_named_and_holds_up_no_other_life(start):
    # A guard is not killed at once: that is as if the kernel did not end it.
    words = [sys.executable, "-c", "import time; time.sleep(10)", GUARD_NAME]
    life = f"print('pid', subprocess.Popen({words}).pid, flush=True)\nnote_run_end()"
    worker = start(f"{life}\ntime.sleep(1000)", end_s=1.0)
    text = worker.until(lambda text: len(addresses(text)) == 2)
    pid = re.findall(r"^pid (\d+)", text, re.MULTILINE)[0]
    assert f"{ADDRESS}: processes that were killed do not end: {pid}\n" in text


def test_a_worker_that_is_started_again_does_not_begin_where_a_run_lost_it(start):
    worker = start("note_beat()\ntime.sleep(1000)", silence_s=100.0)
    worker.until(lambda text: worker.memory.exists())
    worker.stop()
    again = start("note_run_end()\ntime.sleep(1000)")
    text = again.until(lambda text: len(addresses(text)) == 2)
    assert addresses(text) == ["tcp://127.0.0.2:26601", ADDRESS]
    assert not again.memory.exists()  # the next one begins at its own address anyway


def test_a_life_whose_run_moves_is_followed_by_one_at_the_next_port(start):
    moves = "from torchtitan_rl.launch.workers import note_move\n"
    worker = start(f"{moves}if sys.argv[1] == {ADDRESS!r}: note_move()\ntime.sleep(1000)")
    text = worker.until(lambda text: len(addresses(text)) == 2)
    assert addresses(text) == list(life_addresses(ADDRESS)[:2])
    assert worker.memory.read_text() == "1"


def given_up(
    patience: Patience, *, beats: int = 0, contacted_s: float = 0.0, within_s: int = 2000
) -> tuple[int, str]:
    """After how many seconds, and why, with a beat in each of the first ones; one look a second."""
    for now_s in range(1, within_s):
        heard = str(min(now_s, beats)) if beats else ""
        if cause := patience.look(now_s, heard, lambda: now_s < contacted_s):  # noqa: B023
            return now_s, cause
    return 0, ""


def test_a_controller_that_was_heard_and_is_silent_for_forty_seconds_is_gone() -> None:
    for unused_s in (None, 60.0):
        at_s, cause = given_up(Patience(0.0, unused_s=unused_s), beats=100)
        assert at_s == 140
        assert cause == "nothing was heard from the controller for 40 s"


def test_where_a_run_was_lost_it_is_not_waited_for_forever() -> None:
    at_s, cause = given_up(Patience(0.0, unused_s=60.0))
    assert at_s == 61  # the first look counts from 0
    assert cause == "the run that was lost did not come back for 60 s"


A, B, C = life_addresses("tcp://10.0.0.2:26600")[:3]


def test_an_attempt_that_failed_is_repeated_with_growing_pauses() -> None:
    attempts, now_s, pauses = Attempts(), 0.0, []
    attempts.note_loss(now_s, A)
    for _ in range(7):
        assert attempts.choose(now_s, [B]) == B
        pauses.append(attempts.note_failure(now_s, B))
        assert attempts.choose(now_s + pauses[-1] - 1, [B]) is None
        now_s += pauses[-1]
    assert pauses == [30, 60, 120, 240, 480, 480, 480]


def test_a_listener_that_was_stopped_does_not_count_its_own_stop():
    silence = Heartbeat(0.0)
    silence.look(1.0, "beat")
    assert silence.look(3601.0, "beat") <= 2 * BEAT_S
    assert silence.look(3602.0, "next beat") == 0
