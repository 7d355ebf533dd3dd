"""The endpoint while weights change underneath, and what its clients notice of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_pull_and_no_pause_changes_loses_or_repeats_a_chat_of_the_official_client(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.real.endpoint_pulls_scenario", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["pauses"], seen["statuses"]) == (10, [200])
    assert seen["versions"] == [20, 20]
    assert not seen["was_over"]  # the chats outlasted the last pull
    assert seen["cuts_heard"] > 64  # versions changed within answers
    # 64 chats twice, of two turns each.
    assert seen["complete"] == 128
    assert seen["equal"] == 64
    assert seen["recorded"] == 128
    assert (seen["polled"], seen["completed"]) == (256, 256)
    assert (seen["refused"], seen["aborted"], seen["outstanding"]) == ({}, 0, 0)
    # Each token was sampled once, and each that was sampled was answered.
    assert seen["sampled"] == seen["answered"]
    assert seen["states"] == ["serving", "serving"]
