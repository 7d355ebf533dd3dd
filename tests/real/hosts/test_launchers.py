"""Launchers on two nodes, with a scripted controller and scripted workers: exit codes, signals,
restarts, and what they leave behind. The nodes are processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.real.runs import ROOT
from torchtitan_rl.backends.monarch.ports import free_port

LAUNCHER = ("tests.support.scripted_program", "launch", "alphabet_sort_tiny", "--num-steps", "2")
TIMEOUT_S = 120.0


class Nodes:
    """The launchers of a run, one process each, and all that they start."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self._tag = str(uuid.uuid4())
        self._port = free_port()
        self._environment = {
            **os.environ,
            "TORCHTITAN_RL_TEST": self._tag,
            "SCRIPTED_DIR": str(folder),
            **environment,
        }
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, *options: str, **environment: str) -> None:
        """A launcher, with the variables that torchrun would set."""
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        place["MASTER_PORT"] = str(self._port)
        self._start([*LAUNCHER, *options], **place, **environment)

    def start_torchrun(self, *options: str) -> None:
        """torchrun's agent of a node, which starts a launcher."""
        rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}"]
        node = ["--nnodes=2", "--nproc-per-node=1", "--local-addr=127.0.0.1", *rendezvous]
        self._start(["torch.distributed.run", *node, *options, "-m", *LAUNCHER])

    def _start(self, words: list[str], **environment: str) -> None:
        with (self.folder / f"launcher{len(self.launchers)}.log").open("w") as log:
            self.launchers.append(
                subprocess.Popen(
                    [sys.executable, "-m", *words],
                    cwd=ROOT,
                    env=self._environment | environment,
                    stdout=log,
                    stderr=log,
                )
            )

    def wait(self) -> list[int]:
        """Exit codes; nothing may be left behind."""
        codes = [launcher.wait(TIMEOUT_S) for launcher in self.launchers]
        wait_until(lambda: not self.processes(), "the end of all that they started")
        return codes

    def log(self, rank: int) -> str:
        return (self.folder / f"launcher{rank}.log").read_text()

    def controllers(self) -> list[list[str]]:
        """The options that each controller was started with."""
        lines = (self.folder / "controllers.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TORCHTITAN_RL_TEST") == self._tag:
                    found.append(process)
        return [one for one in found if one.status() != psutil.STATUS_ZOMBIE]

    def kill_all(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for launcher in self.launchers:
            launcher.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(controller: str) -> Nodes:
        made.append(Nodes(tmp_path, SCRIPTED_CONTROLLER=controller))
        return made[-1]

    yield make
    for one in made:
        one.kill_all()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"never came: {what}"
        time.sleep(0.1)


def option(words: list[str], name: str) -> list[str]:
    """The values of an option."""
    rest = words[words.index(name) + 1 :]
    number = next((place for place, word in enumerate(rest) if word.startswith("--")), len(rest))
    return rest[:number]


def test_all_exit_with_the_code_of_the_controller_which_has_all_workers_in_order(nodes) -> None:
    run = nodes("exit 3")
    run.start(0)
    run.start(1)
    assert run.wait() == [3, 3]
    (words,) = run.controllers()
    assert words[:3] == ["alphabet_sort_tiny", "--num-steps", "2"]
    attached = option(words, "--launch.attach")
    printed = [next(line.split()[-1] for line in run.log(rank).splitlines()) for rank in (0, 1)]
    assert attached == printed
    assert "--checkpoint.resume" not in words


def test_a_signal_at_any_node_reaches_the_controller_once(nodes, tmp_path) -> None:
    run = nodes("wait")
    run.start(0)
    run.start(1)
    wait_until((tmp_path / "waits").exists, "a controller")
    run.launchers[1].send_signal(signal.SIGTERM)
    assert run.wait() == [128 + signal.SIGTERM] * 2
    assert (tmp_path / "signals").read_text() == "1"


def test_a_node_whose_worker_does_not_start_ends_the_run_before_it_begins(nodes, tmp_path) -> None:
    run = nodes("exit 0")
    run.start(0)
    run.start(1, SCRIPTED_WORKER="fail")
    assert run.wait() == [1, 1]
    assert "error: LauncherError: node 1: the worker ended with code 1" in run.log(0)
    assert not (tmp_path / "controllers.jsonl").exists()


@pytest.mark.soak
def test_a_node_whose_options_are_wrong_ends_the_run_with_2(nodes) -> None:
    run = nodes("exit 0")
    run.start(0)
    run.start(1, "--launch.interface", "eth77")
    assert run.wait() == [2, 2]
    assert "error: node 1: launch.interface is 'eth77': this node has no such" in run.log(0)
    assert run.log(1) == ""


@pytest.mark.soak
def test_when_the_launcher_of_rank_0_is_killed_all_end(nodes, tmp_path) -> None:
    run = nodes("wait")
    run.start(0)
    run.start(1)
    wait_until((tmp_path / "waits").exists, "a controller")
    run.launchers[0].kill()
    assert run.wait() == [-signal.SIGKILL, 1]
    assert (tmp_path / "signals").read_text() == "1"  # it could write a checkpoint


@pytest.mark.soak
def test_a_restart_of_torchrun_resumes_on_new_workers(nodes) -> None:
    run = nodes("fail once")
    for _ in range(2):
        run.start_torchrun("--max-restarts=1")
    assert run.wait() == [0, 0], run.log(0)
    first, second = run.controllers()
    assert "--checkpoint.resume" not in first
    assert "--checkpoint.resume" in second
    attached = [set(option(words, "--launch.attach")) for words in (first, second)]
    assert attached[0].isdisjoint(attached[1])


@pytest.mark.soak
def test_a_signal_to_one_torchrun_ends_all_of_them(nodes, tmp_path) -> None:
    run = nodes("wait")
    for _ in range(2):
        run.start_torchrun()
    wait_until((tmp_path / "waits").exists, "a controller")
    run.launchers[1].send_signal(signal.SIGINT)
    assert all(code != 0 for code in run.wait())
    assert (tmp_path / "signals").read_text() == "1"
