"""Long and repeated whole runs: `make soak` reports what they print."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter

import psutil
import pytest

from tests.real.runs import TINY, Run, options, printing_to, read_metrics, require_audit
from torchtitan_rl.experiments.agent_libraries.libraries import LIBRARIES

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


def test_agents_of_all_libraries_survive_pulls_pauses_and_a_killed_replica(tmp_path, capsys):
    """64 sessions a step and more at once, 20 pulls, an abort pause in each step."""
    libraries = [str(TINY.with_name("agent_libraries_tiny.py")), "--task.libraries", *LIBRARIES]
    limits = ["--rollout.max-total-tokens", "4096", "--generator.max-model-len", "4096"]
    run = Run(
        [
            *libraries,
            *limits,
            *(
                "--trainer.max-episode-tokens",
                "4096",
                "--rollout.max-turns",
                "16",
                "--num-steps",
                "20",
            ),
            *("--rollout.groups-per-step", "8", "--rollout.group-size", "8"),
            *("--schedule.staleness", "1", "--schedule.during-training", "pause"),
            *("--evaluation.num-problems", "0", "--metrics.progress", "plain"),
            *("--output-dir", str(tmp_path), "--name", "run"),
        ],
        log=tmp_path / "log",
    )
    run.wait_until(lambda: len(read_metrics(tmp_path / "run")) > 5, "five steps")
    run.process_of("replica1-rank0").kill()
    assert run.wait(1800.0) == 0, run.log.read_text()[-3000:]
    require_audit(tmp_path / "run")
    rows = [row for row in read_metrics(tmp_path / "run") if row["step"]]
    assert [row["step"] for row in rows] == list(range(1, 21))
    endings = Counter[str]()
    for row in rows:
        endings.update({name: row[name] for name in row if name.startswith("train/ended_")})
    with capsys.disabled():
        shares = {name: number / len(rows) for name, number in (+endings).items()}
        print(f"\nhow rollouts ended: {shares}")
    assert not endings["train/ended_generation_error"]
    assert not endings["train/ended_cancelled"]
