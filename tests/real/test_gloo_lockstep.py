"""Two ranks in lockstep over gloo: big decisions, a long idle time, a lost peer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.real.runs import ROOT
from tests.real.trainer_helpers import free_ports

SCENARIOS = {  # name -> (scenario, timeout_s, heartbeat_s, what rank 0 says happened)
    "idle": ("idle", 6.0, 0.5, "completed"),
    # Without the heartbeat the waiting rank's gloo raises.
    "idle without heartbeats": ("idle", 3.0, 1000.0, "failed"),
    "lost": ("lost", 6.0, 0.5, "failed"),
}


def start(rank: int, port: int, scenario: str, *seconds: float) -> subprocess.Popen[str]:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.real.lockstep_scenarios", scenario, *map(str, seconds)],
        cwd=ROOT,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.fixture(scope="module")
def ranks() -> Iterator[dict[str, list[subprocess.Popen[str]]]]:
    """Of all scenarios, which mostly wait, at the same time."""
    started: dict[str, list[subprocess.Popen[str]]] = {}
    for (name, (*arguments, _)), port in zip(SCENARIOS.items(), free_ports(3), strict=True):
        started[name] = [start(rank, port, *arguments) for rank in range(2)]
    yield started
    for rank in (rank for both in started.values() for rank in both):
        rank.kill()
        rank.communicate()


@pytest.mark.parametrize("name", SCENARIOS)
def test_trap_14_idle_ranks_stay_alive_and_a_lost_rank_fails_every_request(
    ranks: dict[str, list[subprocess.Popen[str]]], name: str
) -> None:
    leader, _ = ranks[name]
    assert leader.communicate(timeout=600)[0].strip() == SCENARIOS[name][-1]
