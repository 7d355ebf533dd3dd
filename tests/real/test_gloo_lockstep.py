"""Two ranks in lockstep over gloo: big decisions, a long idle time, a lost peer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.real.runs import ROOT
from tests.real.trainer_helpers import free_ports


def play(scenario: str, *, timeout_s: float, heartbeat_s: float) -> str:
    """What rank 0 says happened."""
    (port,) = free_ports(1)
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.real.lockstep_scenarios"),
                *(scenario, str(timeout_s), str(heartbeat_s)),
            ],
            cwd=ROOT,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return ranks[0].communicate(timeout=600)[0].strip()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.parametrize(
    ("scenario", "timeout_s", "heartbeat_s", "ending"),
    [
        ("idle", 6.0, 0.5, "completed"),
        ("idle", 3.0, 1000.0, "failed"),  # without the heartbeat the waiting rank's gloo raises
        ("lost", 6.0, 0.5, "failed"),
    ],
)
def test_trap_14_idle_ranks_stay_alive_and_a_lost_rank_fails_every_request(
    scenario: str, timeout_s: float, heartbeat_s: float, ending: str
) -> None:
    assert play(scenario, timeout_s=timeout_s, heartbeat_s=heartbeat_s) == ending
