"""Servers of tests in processes of their own."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = str(Path(__file__).parents[2])


@contextmanager
def served(module: str, *arguments: str, port: int = 0) -> Iterator[int]:
    """The port of ``python -m MODULE PORT ARGUMENTS``, once it listens; 0: a free one."""
    if not port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    command = [sys.executable, "-m", module, str(port), *arguments]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            while not _listens(port):
                assert process.poll() is None, f"{module} has ended"
            yield port
        finally:
            process.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
