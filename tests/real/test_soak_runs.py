"""Long and repeated whole runs: `make soak` reports what they print."""

from __future__ import annotations

import contextlib
import random
import time

import psutil
import pytest

from tests.real.runs import TINY, Run, options, printing_to, read_metrics

pytestmark = pytest.mark.soak

DEMO_TIMEOUT_S = 1800.0


@pytest.mark.timeout(DEMO_TIMEOUT_S + 60)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_whatever_the_seed(tmp_path, capsys, seed):
    demo = [str(TINY), "--seed", str(seed), "--metrics.progress", "plain"]
    started = time.monotonic()
    run = Run([*demo, "--output-dir", str(tmp_path), "--name", "demo"], log=tmp_path / "log")
    assert run.wait(DEMO_TIMEOUT_S) == 0, run.log.read_text()[-3000:]
    minutes = (time.monotonic() - started) / 60
    assert run.left_behind() == []
    rows = read_metrics(tmp_path / "demo")
    rewards = [row["evaluation/reward_mean"] for row in rows if "evaluation/reward_mean" in row]
    diff = max(row.get("trainer/logprob_diff_max", 0.0) for row in rows)
    with capsys.disabled():
        print(
            f"\nseed {seed}: validation reward {rewards[0]:.3f} -> {rewards[-1]:.3f} in "
            f"{minutes:.1f} minutes (8 are allowed on a quiet machine), "
            f"largest logprob difference {diff:.1e}"
        )
    assert rewards[0] <= 0.5
    assert rewards[-1] >= 0.8


@pytest.mark.parametrize("index", range(12))
def test_a_run_ends_and_leaves_no_process_whatever_is_killed_whenever(tmp_path, capsys, index):
    """Before, while or after its processes start; the controller, a replica, the trainer or one
    of Monarch's own."""
    rng = random.Random(index)
    delay_s = rng.uniform(1.0, 30.0)
    run = Run(options(tmp_path, "run", "--num-steps", "8"), log=tmp_path / "log")
    time.sleep(delay_s)
    processes = sorted(run.processes(), key=lambda process: process.pid)
    killed = "nothing: the run was over"
    if processes:
        victim = rng.choice(processes)
        with contextlib.suppress(psutil.NoSuchProcess):
            killed = "the controller" if victim.pid == run.process.pid else printing_to(victim)
            victim.kill()
    code = run.wait()
    with capsys.disabled():
        print(f"\nkilled after {delay_s:.1f} s: {killed}; exit code {code}")
    assert run.left_behind() == []
    assert code in (0, 1, -9)
