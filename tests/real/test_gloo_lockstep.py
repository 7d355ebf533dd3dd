"""Two ranks in lockstep over gloo: big decisions, a long idle time, a lost peer."""

from __future__ import annotations

import pytest

from tests.real.runs import play
from tests.real.trainer_helpers import free_ports

SCENARIOS = {  # name -> (scenario, timeout_s, heartbeat_s, what rank 0 says happened)
    "idle": ("idle", 6.0, 0.5, "completed"),
    # Without the heartbeat the waiting rank's gloo raises.
    "idle without heartbeats": ("idle", 3.0, 1000.0, "failed"),
    "lost": ("lost", 6.0, 0.5, "failed"),
}


@pytest.fixture(scope="module")
def happened() -> dict[str, str]:
    ports = free_ports(len(SCENARIOS))
    words = [
        word
        for (*arguments, _), port in zip(SCENARIOS.values(), ports, strict=True)
        for word in (*arguments, port)
    ]
    return dict(zip(SCENARIOS, play("lockstep_scenarios", *words), strict=True))


@pytest.mark.parametrize("name", SCENARIOS)
def test_trap_14_idle_ranks_stay_alive_and_a_lost_rank_fails_every_request(
    happened: dict[str, str], name: str
) -> None:
    assert happened[name] == SCENARIOS[name][-1]
