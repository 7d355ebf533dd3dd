"""The long-tail benchmark on its smallest setting: real replica, real controller."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODES = ("synchronous", "over-admit restart", "over-admit aborted", "async S=1")


def test_all_modes_train_the_same_answers_and_only_restarts_throw_tokens_away(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.long_tail"),
            *("--groups", "4", "--group-size", "2", "--median", "6", "--long-share", "0.12"),
            *("--steps", "4", "--repeats", "1", "--replicas", "1", "--train-s", "0.0"),
            *("--modes", *MODES, "--output", str(tmp_path / "long_tail.json")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    report = json.loads((tmp_path / "long_tail.json").read_text())
    assert (tmp_path / "long_tail.png").stat().st_size > 0
    assert report["answers"]["long_per_step"] == 1
    assert report["machine"]["cores"] > 0
    assert tuple(report["modes"]) == tuple(report["ratios"]) == MODES
    assert report["ratios"]["synchronous"] == {"rollout_phase": 1.0, "groups_per_second": 1.0}
    modes = report["modes"]
    # Each answer has the length that was drawn for it: the benchmark itself fails otherwise.
    for name in ("synchronous", "async S=1"):  # nobody overtakes: the same groups, in order
        assert modes[name]["tokens_trained"] == modes["synchronous"]["tokens_trained"]
        assert modes[name]["long_per_step"] == 1
    assert {name: row["age_max"] for name, row in modes.items()} == {
        "synchronous": 0,
        "over-admit restart": 0,
        "over-admit aborted": 1,
        "async S=1": 1,
    }
    for name, row in modes.items():
        if name != "over-admit restart":
            assert row["tokens_thrown_away"] == 0, name
    assert modes["over-admit restart"]["tokens_thrown_away"] > 0
    assert set(modes["over-admit restart"]["causes"]) <= {"restarted", "cut"}
    [repeat] = report["repeats"]["async S=1"]
    assert len(repeat["rollout_s_of_steps"]) == 2 + 4 + 1
    assert repeat["groups_per_second"] == pytest.approx(modes["async S=1"]["groups_per_second"])
