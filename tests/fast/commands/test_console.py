"""What a person sees of a run, and what Ctrl-C does to it at any moment."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.simulated_train import NOISE
from torchtitan_rl.commands.console import StopSignals
from torchtitan_rl.observability.console import describe_run

ROOT = Path(__file__).parents[3]
TINY = str(ROOT / "configs" / "alphabet_sort_tiny.py")
SMALL = (
    "--rollout.groups-per-step", "4",
    "--rollout.group-size", "2",
    "--rollout.sampling.max-tokens-per-turn", "6",
    "--evaluation.num-problems", "2",
    "--metrics.trackers",
    "--metrics.progress", "plain",
)  # fmt: skip


class Train:
    """A run in a session of its own, as in a terminal."""

    def __init__(self, folder: Path, *options: str, config: str = TINY) -> None:
        self.options = [config, *SMALL, "--output-dir", str(folder), "--name", "run", *options]
        self.run_dir, self._out = folder / "run", folder / "out"
        with self._out.open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.simulated_train", *self.options],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def lines(self) -> list[str]:
        return self._out.read_text().splitlines()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while not any(text in line for line in self.lines()):
            assert self._process.poll() is None, self.lines()
            assert time.monotonic() < deadline, self.lines()
            time.sleep(0.02)

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)

    def ctrl_c(self) -> None:
        with suppress(ProcessLookupError):  # it has stopped already
            os.killpg(self._process.pid, signal.SIGINT)

    def wait(self) -> int:
        return self._process.wait(60)


def test_a_run_whose_standard_streams_are_closed_is_complete(tmp_path: Path) -> None:
    words = [TINY, *SMALL, "--output-dir", str(tmp_path), "--name", "run", "--num-steps", "2"]
    own = [sys.executable, "-m", "tests.support.simulated_train", *words]
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *own]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == 0
    assert (tmp_path / "run" / "manifest.json").exists()


def test_a_run_says_what_runs_where_and_how_it_went_alone(
    tmp_path: Path,
) -> None:
    run = Train(tmp_path, "--num-steps", "2")
    assert run.wait() == 0, run.lines()
    first, *lines = run.lines()
    folder = run.run_dir
    assert first == (
        f"[0:00] run: steps 1 to 2, 2 replicas on cpu, trainer on cpu; outputs in {folder}"
    )
    assert lines[0].endswith(f"] starting 2 replicas and the trainer; logs in {folder / 'logs'}")
    start = next(number for number, line in enumerate(lines) if line.startswith("done: "))
    assert all(line.startswith("[") for line in lines[:start])
    done, evaluation, *others = lines[start:]
    assert done.startswith("done: 2 steps in ")
    assert evaluation.startswith("evaluation: reward ")
    assert "before the first step, then reward " in evaluation
    assert evaluation.endswith("after step 2")
    if others[0].startswith("time: "):  # some phase took half a second
        del others[0]
    assert re.fullmatch(r"tokens: \d+ sampled: \d+ trained", others[0])
    for chosen, example in (("best", others[1:4]), ("worst", others[4:7])):
        assert example[0].startswith(f"{chosen} rollout of step 2: reward ")
        assert example[1].startswith("  first message: 'Sort the names")
        assert example[2].startswith("  last answer: ")
    assert others[7:] == [
        f"rollouts: {folder / 'rollouts.jsonl'}",
        f"trace: {folder / 'trace.json'}",
        f"next: torchtitan-rl view {folder}",
        f"next: torchtitan-rl audit {folder}",
    ]
    assert not any(NOISE in line for line in run.lines())
    assert (folder / "logs" / "controller.log").read_text().count(NOISE) == 4


def test_the_times_of_phases_are_told_if_they_count(tmp_path: Path) -> None:
    lines = describe_run(
        tmp_path,
        headline="done",
        warnings=(),
        seconds={"rollout": 3725.0, "train": 0.6, "publish": 0.4, "evaluation": 61.0},
        totals={},
        examples=(),
        outputs={},
        next_commands=(),
    )
    times = "waiting for rollouts 1:02:05, training 0:01; alongside: evaluation 1:01"
    assert lines == ["done", f"time: {times}"]


def test_a_reader_that_leaves_gets_no_traceback(tmp_path: Path) -> None:
    command = shlex.join([sys.executable, "-m", "torchtitan_rl.commands.cli", "--help"])
    errors = tmp_path / "errors"
    script = f"set -o pipefail; (sleep 0.3; exec {command} 2>{errors}) | exec true"
    code = subprocess.run(["bash", "-c", script], cwd=ROOT, check=False, timeout=60).returncode
    assert code == 128 + signal.SIGPIPE
    assert errors.read_text() == ""


def test_ctrl_c_while_the_configuration_is_loaded_is_one_line(tmp_path: Path) -> None:
    config = tmp_path / "slow.py"
    config.write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    run = Train(tmp_path, config=str(config))
    run.wait_for("loading")
    for _ in range(3):  # as by `timeout`, which signals the command and its group
        run.ctrl_c()
    assert run.wait() == 128 + signal.SIGINT
    assert run.lines() == ["loading", "stopped"]


@pytest.mark.parametrize(
    ("distance_s", "effects"), [(0.0, ["stop"]), (0.9, ["stop"]), (1.1, ["stop", "cancel"])]
)
def test_signals_within_a_second_are_one_request_to_stop(
    distance_s: float, effects: list[str]
) -> None:
    now_s, found = 100.0, []

    async def command() -> None:
        nonlocal now_s
        signals = StopSignals(clock=lambda: now_s)
        signals.install()
        signals.stop_cleanly = lambda: found.append("stop")
        try:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.05)
                now_s += distance_s
        except asyncio.CancelledError:
            found.append("cancel")

    asyncio.run(command())
    assert found == effects


def test_a_command_stops_itself_once_and_as_by_sigterm() -> None:
    found: list[str] = []

    async def command() -> StopSignals:
        signals = StopSignals()
        signals.install()
        signals.stop_cleanly = lambda: found.append("stop")
        for _ in range(2):
            signals.stop()
            await asyncio.sleep(0.05)
        return signals

    signals = asyncio.run(command())
    assert (found, signals.exit_code, signals.name) == (["stop"], 143, "SIGTERM")


AT_OTHER_MOMENTS = [("steps 1 to 50", 1), ("evaluation after step 0", 1), ("step 2/50", 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "times"),
    [
        ("step 1/50", 2),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in AT_OTHER_MOMENTS),
    ],
)
def test_ctrl_c_ends_a_run_at_any_moment_without_a_traceback(
    moment: str, times: int, tmp_path: Path
) -> None:
    run = Train(tmp_path, "--num-steps", "50")
    run.wait_for(moment)
    for _ in range(times):
        run.ctrl_c()
        time.sleep(1.1)
    assert run.wait() == 128 + signal.SIGINT, run.lines()
    lines = run.lines()
    assert not any("Traceback" in line for line in lines)
    (stopped,) = [at for at, line in enumerate(lines) if line.startswith("stopped by SIGINT ")]
    steps = sorted(int(one.name[-6:]) for one in run.run_dir.glob("checkpoints/step-??????"))
    if steps:
        assert lines[stopped + 1] == f"the last checkpoint is of step {steps[-1]}"
    else:
        assert lines[stopped + 1].startswith("no checkpoint was written: ")
    resume = shlex.join(["torchtitan-rl", "train", *run.options, "--checkpoint.resume"])
    assert f"next: {resume}" in lines


def test_trap_29_a_run_that_diverges_fails_and_says_at_once_where_it_starts_when_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIVERGES", "1")
    run = Train(tmp_path, "--num-steps", "50")
    assert run.wait() == 1
    assert "error: DivergedError: loss is nan" in run.lines()
    monkeypatch.delenv("DIVERGES")
    run = Train(tmp_path, "--num-steps", "2", "--checkpoint.resume")
    assert run.wait() == 0, run.lines()
    assert [line.partition("] ")[2] for line in run.lines()[:3]] == [
        f"run: steps 1 to 2, 2 replicas on cpu, trainer on cpu; outputs in {run.run_dir}",
        "changed since the run's last start: num_steps: 50 -> 2",
        f"start: step 1 again; {run.run_dir} has no checkpoint yet",
    ]
    run = Train(tmp_path, "--num-steps", "3", "--checkpoint.resume")
    assert run.wait() == 0, run.lines()
    start = f"start: continues from the checkpoint of step 2 in {run.run_dir}"
    assert run.lines()[2].endswith(start), run.lines()
