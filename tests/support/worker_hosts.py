"""Monarch workers on loopback addresses of this machine, each as a host of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torchtitan_rl.launch.interfaces import free_port

_WORKER = "torchtitan_rl.backends.monarch.worker_loop"


@contextmanager
def worker_hosts(number: int) -> Iterator[list[str]]:
    """Their addresses; the workers end with the context."""
    names = [f"127.0.0.{index + 2}" for index in range(number)]
    addresses = [f"tcp://{name}:{free_port(name)}" for name in names]
    workers = [subprocess.Popen([sys.executable, "-m", _WORKER, address]) for address in addresses]
    try:
        yield addresses
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
