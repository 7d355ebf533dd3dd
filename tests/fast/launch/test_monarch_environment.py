"""What is set before Monarch is imported, and before the ranks of a group meet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.launch.interfaces import interface_towards, listen_privately
from torchtitan_rl.launch.monarch_environment import set_monarch_environment

OWN = Address.parse("tcp://127.0.0.1:26600")
WATCHDOG = "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT"
IDLE = "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE"


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """All is as it was after each test; what these set is not set before."""
    before = dict(os.environ)
    for name in [one for one in before if one.endswith(("_IFNAME", "_MAX_IDLE", "_TIMEOUT"))]:
        del os.environ[name]
    yield
    os.environ.clear()
    os.environ.update(before)


def test_monarch_sees_losses_soon_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    os.environ[IDLE] = "120s"
    set_monarch_environment(None, OWN, field="launch.keys")
    assert os.environ[WATCHDOG] == "15s"  # as `launch.workers` has it for hosts
    assert os.environ[IDLE] == "120s"


def test_ranks_exchange_gradients_on_the_interface_of_the_first_rank() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.9", "MASTER_PORT": "1", "RANK": "1"}
    listen_privately()
    loopback = interface_towards("127.0.0.1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (loopback,) * 2
