"""Where process groups listen; `tests/real/test_main_job.py` looks at the sockets of a run."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from torchtitan_rl.backends.monarch.ports import free_port
from torchtitan_rl.launch.process_groups import interface_towards

_RANK = """
import os, sys
import psutil
import torch.distributed as dist
from torchtitan_rl.launch.process_groups import listen_privately

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2], "RANK": sys.argv[1]}
os.environ["WORLD_SIZE"] = "2"
listen_privately()
dist.init_process_group("gloo")
dist.barrier()
sockets = psutil.Process().net_connections("inet")
print(*{one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN})
dist.barrier()
"""


def test_the_interface_to_this_machine_is_its_loopback_one() -> None:
    name = interface_towards("127.0.0.1")
    assert "127.0.0.1" in {address.address for address in psutil.net_if_addrs()[name]}
    assert interface_towards("127.0.0.9") == interface_towards("localhost") == name
    assert interface_towards("not a name") == ""


@pytest.mark.slow  # torch is imported twice
def test_ranks_on_one_host_meet_and_listen_on_loopback_alone() -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, f"{rank}", f"{port}"], stdout=subprocess.PIPE, text=True
        )
        for port in [free_port()]
        for rank in (0, 1)
    ]
    assert [rank.communicate(timeout=300)[0] for rank in ranks] == ["127.0.0.1\n"] * 2
