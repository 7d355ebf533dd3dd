"""The router over replicas in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_pull_no_pause_and_no_kill_changes_loses_or_repeats_a_streamed_greedy_request(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.real.router_scenario", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["num_done"], seen["num_equal"]) == (64, 64)
    assert seen["partials_fit"]
    assert seen["partial_tokens"] > 64
    assert seen["heard_fits"]  # what was streamed is the beginning of each completion
    assert seen["gaps"] == 0
    assert seen["messages"] > 10 * 64
    assert seen["unheard"] < 64 * 20  # the last of them come with the completions
    assert seen["num_boundaries"] > 64
    assert seen["replicas"] == ["replica0", "replica1"]
    assert seen["states"] == ["serving", "serving"]
    assert (seen["outstanding"], seen["lagging"]) == (0, 0)
    assert set(seen["unaccounted"]) == {0}  # aborts, cancels and pulls lose no sampled token
    assert seen["known"] == seen["sampled"] > 64 * 100
    assert seen["not_returned"] == 20
    pin = seen["pin"]
    assert pin["sampled_under"] == [pin["version"]]
    assert pin["is_held"]
    assert pin["others"] == [pin["version"], pin["version"] + 1]
    assert pin["after"] == [pin["version"] + 1] * 2
    killed = seen["killed"]
    assert killed["num_equal"] == 16  # streams go on where their replica died
    assert killed["heard_fits"]
    assert killed["gaps"] == 0
    assert killed["states"] == {"replica0": "dead", "replica1": "serving"}
