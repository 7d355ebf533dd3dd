"""``torchtitan-rl explain`` on real runs with one planted fault each, and on healthy ones."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from threading import Event, Thread

import psutil
import pytest

from tests.real.runs import TINY, Run, printing_to

pytestmark = pytest.mark.soak

STEPS = ("--num-steps", "18", "--evaluation.num-problems", "32", "--evaluation.every", "0")
LEVELS = ("--trainer.optimizer.decay-steps", "0")
ONE_CORE_EACH = ("--generator.replicas", "1", "--trainer.threads", "1")
ASYNCHRONOUS = ("--schedule.staleness", "2", *ONE_CORE_EACH)
SICK = {
    "learning rate too high": ("--trainer.optimizer.learning-rate", "0.02", *LEVELS),
    "groups without variance": (
        *("--task.min-names", "4", "--task.max-names", "4", "--task.min-turns", "3"),
        *("--task.power", "200"),
    ),
    "sampling temperature": ("--rollout.sampling.temperature", "0.05"),
    "answers get shorter and worse": (
        *("--rollout.overlong.buffer-tokens", "36", "--rollout.overlong.penalty", "50"),
    ),
    "generation is too slow for the trainer": (
        *ASYNCHRONOUS,
        *("--trainer.optimizer.learning-rate", "1e-5", "--rollout.group-size", "16"),
        *("--generator.max-running-requests", "4"),
    ),
    "buffer too small": (
        *("--schedule.staleness", "1", *ONE_CORE_EACH, "--rollout.groups-per-step", "1"),
    ),
}
HEALTHY = {"synchronous": (), "asynchronous": ("--schedule.staleness", "1")}


def explained(run_dir: Path) -> tuple[int, list[str]]:
    """The exit code of ``explain``, and the causes that it found."""
    command = [sys.executable, "-m", "torchtitan_rl.commands.cli", "explain", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr)
    found = [line for line in done.stdout.splitlines() if line.startswith("found: ")]
    return done.returncode, [line.removeprefix("found: ").partition(":")[0] for line in found]


def run_to_the_end(folder: Path, *options: str, config: Path = TINY) -> Path:
    words = [str(config), *STEPS, *options, "--output-dir", str(folder), "--name", "run"]
    run = Run(words, log=folder / "log")
    assert run.wait(600) == 0, run.log.read_text()[-3000:]
    return folder / "run"


@pytest.mark.timeout(660)
@pytest.mark.parametrize("cause", SICK)
def test_the_planted_cause_of_a_sick_run_is_named(tmp_path: Path, cause: str) -> None:
    assert explained(run_to_the_end(tmp_path, *SICK[cause])) == (1, [cause])


@pytest.mark.timeout(660)
def test_a_slow_environment_is_named(tmp_path: Path) -> None:
    config = Path(__file__).with_name("slow_env_config.py")
    assert explained(run_to_the_end(tmp_path, config=config)) == (1, ["slow environment"])


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
    assert explained(tmp_path / "run") == (1, ["one slow replica"])


@pytest.mark.timeout(660)
@pytest.mark.parametrize("kind", HEALTHY)
def test_nothing_is_found_in_a_healthy_run(tmp_path: Path, kind: str) -> None:
    assert explained(run_to_the_end(tmp_path, *HEALTHY[kind])) == (0, [])
