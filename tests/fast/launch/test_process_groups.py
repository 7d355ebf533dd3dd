"""Where process groups listen, and to whom; `tests/real/test_other_users.py` looks at a run."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import psutil
import pytest

from tests.support.other_user import as_other_user, listening_sockets, needs_root, reach

_RANK = """
import os, sys
from torchtitan_rl.launch.interfaces import listen_privately, take_port

rank, *port = sys.argv[1:]
if rank == "0":
    port = [take_port("127.0.0.1")]
    print(*port, flush=True)
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(*port)}
os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
import torch.distributed as dist

listen_privately()
dist.init_process_group("gloo")
print("met", flush=True)
sys.stdin.read()
dist.new_group([0, 1], backend="gloo")
dist.barrier()
"""


def start_rank(*words: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", _RANK, *words], stdin=pipe, stdout=pipe, text=True
    )


@pytest.mark.slow  # torch is imported twice
@needs_root
def test_ranks_on_one_host_meet_on_loopback_and_are_closed_to_other_users() -> None:
    with ExitStack() as stack:
        ranks = [start_rank("0")]
        stack.callback(lambda: [rank.kill() for rank in ranks])
        assert ranks[0].stdout is not None
        port = ranks[0].stdout.readline().strip()
        ranks.append(start_rank("1", port))
        require_closed(ranks, int(port))


def require_closed(ranks: list[subprocess.Popen[str]], port: int) -> None:
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "met\n"
    sockets = [one for rank in ranks for one in listening_sockets(psutil.Process(rank.pid))]
    assert ("127.0.0.1", port) in [address for _, address in sockets]
    for family, address in sockets:
        assert address[0] == "127.0.0.1"
        assert as_other_user(lambda: reach(family, address)) == "closed"  # noqa: B023
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.close()
    assert [rank.wait() for rank in ranks] == [0, 0]  # they go on
