"""``torchtitan-rl scale`` on a real run."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import pytest

from tests.real.runs import Run, options, read_metrics, read_rollouts, require_audit
from tests.support.waiting_engines import environment
from torchtitan_rl.observability.failures import read_failures

STEPS = 16
PHASE_S = 45.0


class Speed:
    """Tokens per second of all replicas, about once a second, until ``has_ended``."""

    def __init__(self, run_dir: Path) -> None:
        self.readings: list[tuple[float, float]] = []
        self.has_ended = threading.Event()
        self._run_dir = run_dir
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while not self.has_ended.wait(1.0):
            with suppress(OSError, ValueError):  # it is not there yet, or any more
                now = json.loads((self._run_dir / "now.json").read_bytes())
                speeds = [one.get("tokens_per_s", 0.0) for one in now.get("replicas", ())]
                self.readings.append((time.monotonic(), sum(speeds)))

    def show(self, phase: str, begin_s: float, end_s: float) -> None:
        """Print the mean from 20 s after the phase began."""
        later = [speed for at_s, speed in self.readings if begin_s + 20.0 <= at_s <= end_s]
        first = [f"{speed:.0f}" for at_s, speed in self.readings if begin_s <= at_s < begin_s + 20]
        mean = f"{fmean(later):.0f}" if later else "no reading"
        print(f"{phase}: {mean} tokens per second from 20 s on; before: {' '.join(first)}")


def scale(run_dir: Path, number: int) -> None:
    log = run_dir.parent / f"scale-{time.monotonic_ns()}"
    words = [str(run_dir), "--replicas", str(number)]
    begun_s = time.monotonic()
    command = Run(words, log=log, command="scale")
    assert command.wait() == 0, log.read_text()
    print(f"scale to {number}: {time.monotonic() - begun_s:.1f} s")


@pytest.mark.soak
def test_a_run_has_1_then_3_then_1_replicas_and_loses_nothing(tmp_path):
    more = ("--generator.replicas", "1", "--generator.max-running-requests", "4")
    more += ("--num-steps", str(STEPS), "--schedule.staleness", "1")
    run_dir = tmp_path / "run"
    run = Run(
        options(tmp_path, "run", *more),
        log=tmp_path / "log",
        environment=environment(tmp_path, 0.2),
    )
    speed, times = Speed(run_dir), []
    try:
        run.wait_until(lambda: len(read_metrics(run_dir)) > 1, "the end of step 1")
        for number in (3, 1):
            time.sleep(PHASE_S)
            times.append(time.monotonic())
            scale(run_dir, number)
            times.append(time.monotonic())
        run.require_success()
    finally:
        run.kill_all()
        speed.has_ended.set()
    speed.show("1 replica", times[0] - PHASE_S, times[0])
    speed.show("3 replicas", times[1], times[2])
    speed.show("1 replica again", times[3], times[3] + PHASE_S)
    said = run.log.read_text()
    for name in ("replica1", "replica2"):
        assert f"{name} is added: answers as replica" in said
        assert f"{name} has left" in said
    require_audit(run_dir)
    assert read_failures(run_dir) == []
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [*range(STEPS + 1)]
    assert {1.0, 3.0} <= {row.get("engine/replicas") for row in rows}
    assert max(row.get("account/lost_tokens", 0) for row in rows) == 0
    turns = [turn for row in read_rollouts(run_dir) for turn in row["turns"]]
    assert {turn["replica"] for turn in turns} == {"replica0", "replica1", "replica2"}
    for row in rows[1:]:
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/discarded"]
