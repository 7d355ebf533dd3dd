"""Token identity (design, invariant 1) over whole rollouts on a real engine."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.real.runs import ROOT, TIMEOUT_S


def test_trap_16_and_17_episode_tokens_equal_engine_tokens_over_three_turns():
    done = subprocess.run(
        [sys.executable, "-m", "tests.real.episode_scenario"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rollouts = json.loads(done.stdout.splitlines()[-1])
    assert len(rollouts) == 16
    assert max(rollout["turns"] for rollout in rollouts) == 3
    for rollout in rollouts:
        assert rollout["tokens_equal"]
        assert rollout["logprobs_equal"]
        assert rollout["sequence_equal"]
