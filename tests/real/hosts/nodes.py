"""The launchers of a run as processes of this machine, one for each node."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from tests.real.runs import ROOT, processes_of
from torchtitan_rl.launch.interfaces import free_port

TIMEOUT_S = 600.0


class Nodes:
    """``words`` are the module that launchers run, and its arguments."""

    def __init__(self, folder: Path, words: Sequence[str], *, num_nodes: int = 2) -> None:
        self.folder = folder
        self._words = words
        self._num_nodes = num_nodes
        self._tag = str(uuid.uuid4())
        self._port = free_port()
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, *options: str, **environment: str) -> None:
        """A launcher, with the variables that torchrun would set."""
        place = {"RANK": str(rank), "WORLD_SIZE": str(self._num_nodes)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
        self._start([*self._words, *options], {**place, **environment})

    def start_torchrun(self, torchrun: Sequence[str], *options: str, **environment: str) -> None:
        """torchrun's agent of a node, which starts a launcher. The first one has the rendezvous."""
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}"]
        rendezvous += [f"--rdzv-conf=is_host={int(not self.launchers)}"]
        node = [f"--nnodes={self._num_nodes}", "--nproc-per-node=1", "--local-addr=127.0.0.1"]
        words = ["torch.distributed.run", *node, *rendezvous, *torchrun, "-m", *self._words]
        self._start([*words, *options], environment)

    def _start(self, words: Sequence[str], environment: dict[str, str]) -> None:
        with (self.folder / f"launcher{len(self.launchers)}.log").open("w") as log:
            self.launchers.append(
                subprocess.Popen(
                    [sys.executable, "-m", *words],
                    cwd=ROOT,
                    env={**os.environ, "TORCHTITAN_RL_TEST": self._tag, **environment},
                    stdout=log,
                    stderr=log,
                )
            )

    def wait(self) -> list[int]:
        """Exit codes; nothing may be left behind."""
        codes = [launcher.wait(TIMEOUT_S) for launcher in self.launchers]
        wait_until(lambda: not self.processes(), "the end of all that they started")
        return codes

    def log(self, node: int) -> str:
        return (self.folder / f"launcher{node}.log").read_text()

    def processes(self) -> list[psutil.Process]:
        return processes_of(self._tag)

    def process_of(self, *words: str) -> psutil.Process:
        """The one whose command line has these words."""
        return next(one for one in self.processes() if set(words) <= set(one.cmdline()))

    def kill_all(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for launcher in self.launchers:
            launcher.wait()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.1)
