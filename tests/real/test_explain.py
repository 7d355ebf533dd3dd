"""``torchtitan-rl explain`` on real runs with one planted fault each, and on healthy ones.

UPDATE_GOLDEN=1 records them for `tests/fast/observability/test_explain.py`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest

from tests.real.runs import TINY, Run, printing_to
from tests.support.recorded_runs import record
from torchtitan_rl.commands.explain import read_facts
from torchtitan_rl.observability.explain import Cause

pytestmark = pytest.mark.soak

STEPS = ("--num-steps", "18", "--evaluation.num-problems", "32", "--evaluation.every", "0")
LEVELS = ("--trainer.optimizer.decay-steps", "0")
ONE_CORE_EACH = ("--generator.replicas", "1", "--trainer.threads", "1")
ASYNCHRONOUS = ("--schedule.staleness", "2", *ONE_CORE_EACH)
SICK = {
    Cause.LEARNING_RATE: ("--trainer.optimizer.learning-rate", "0.02", *LEVELS),
    Cause.ZERO_VARIANCE: (  # all turns right or no reward, and too many names for max_tokens
        *("--task.min-names", "8", "--task.max-names", "8", "--task.min-turns", "3"),
        *("--task.power", "1e5"),
    ),
    Cause.TEMPERATURE: ("--rollout.sampling.temperature", "0.05"),
    Cause.LENGTH_COLLAPSE: (
        *("--rollout.overlong.buffer-tokens", "36", "--rollout.overlong.penalty", "50"),
        *("--rollout.groups-per-step", "48", "--num-steps", "12"),
    ),
    Cause.STARVING_TRAINER: (
        *ASYNCHRONOUS,
        *("--trainer.optimizer.learning-rate", "1e-5", "--rollout.group-size", "16"),
        *("--generator.max-running-requests", "4"),
    ),
    Cause.SMALL_BUFFER: (
        *("--schedule.staleness", "1", *ONE_CORE_EACH, "--rollout.groups-per-step", "1"),
        *("--num-steps", "80"),  # of a fraction of a second each
    ),
    Cause.SLOW_ENVIRONMENT: (),
}
CONFIGS = {Cause.SLOW_ENVIRONMENT: Path(__file__).with_name("slow_env_config.py")}
HEALTHY = {"synchronous": (), "asynchronous": ("--schedule.staleness", "1")}


def require_found(planted: list[Cause], run_dir: Path, name: str) -> None:
    """``explain`` names exactly the planted causes."""
    if os.environ.get("UPDATE_GOLDEN"):
        record(name, planted, read_facts(run_dir))
    command = [sys.executable, "-m", "torchtitan_rl.commands.cli", "explain", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    found = [line for line in done.stdout.splitlines() if line.startswith("found: ")]
    assert [line.removeprefix("found: ").partition(":")[0] for line in found] == planted
    assert done.returncode == bool(planted)


def run_to_the_end(folder: Path, *options: str, config: Path = TINY) -> Path:
    words = [str(config), *STEPS, *options, "--output-dir", str(folder), "--name", "run"]
    run = Run(words, log=folder / "log")
    assert run.wait(600) == 0, run.log.read_text()[-3000:]
    return folder / "run"


@pytest.mark.timeout(660)
@pytest.mark.parametrize("cause", SICK)
def test_the_planted_cause_of_a_sick_run_is_named(tmp_path: Path, cause: Cause) -> None:
    run_dir = run_to_the_end(tmp_path, *SICK[cause], config=CONFIGS.get(cause, TINY))
    require_found([cause], run_dir, cause.name.lower())


@pytest.mark.timeout(660)
def test_a_slow_replica_is_named(tmp_path: Path) -> None:
    """One replica has a fifth of the time: it is stopped again and again."""
    words = [str(TINY), *STEPS, "--output-dir", str(tmp_path), "--name", "run"]
    words += ["--metrics.rollouts-per-step", "32", "--rollout.sampling.max-tokens-per-turn", "24"]
    run = Run(words, log=tmp_path / "log")
    is_over = Event()

    def slow_down() -> None:
        while not is_over.is_set():
            slow = [one for one in run.processes() if "replica1" in printing_to(one)]
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in slow:
                    one.suspend()
                time.sleep(0.02)
                for one in slow:
                    one.resume()
            time.sleep(0.005)

    thread = Thread(target=slow_down)
    thread.start()
    try:
        assert run.wait(600) == 0, run.log.read_text()[-3000:]
    finally:
        is_over.set()
        thread.join()
    require_found([Cause.SLOW_REPLICA], tmp_path / "run", "slow_replica")


@pytest.mark.timeout(660)
@pytest.mark.parametrize("kind", HEALTHY)
def test_nothing_is_found_in_a_healthy_run(tmp_path: Path, kind: str) -> None:
    require_found([], run_to_the_end(tmp_path, *HEALTHY[kind]), kind)
