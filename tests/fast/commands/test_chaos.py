"""``torchtitan-rl chaos`` on processes that stand for those of a run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

import psutil
import pytest

from torchtitan_rl.commands import chaos
from torchtitan_rl.commands.chaos import find_controller, processes_of, schedule

# A controller with ranks that print to logs of their names and have helpers.
CONTROLLER = """
import subprocess, sys, time
from pathlib import Path
from torchtitan_rl.launch.lease import hold_run
run = Path(sys.argv[1])
(run / "logs").mkdir(parents=True)
with hold_run(run):
    for name in ("replica0-rank0", "replica1-rank0", "trainer-rank0"):
        with (run / "logs" / f"{name}.log").open("w") as log:
            code = "import subprocess; subprocess.run(['sleep', '60'])"
            command = [sys.executable, "-c", code]
            subprocess.Popen(command, stdout=log, start_new_session=True)
    print("started", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", CONTROLLER, str(run_dir)]
    controller = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    assert controller.stdout is not None
    assert controller.stdout.readline() == "started\n"
    below = psutil.Process(controller.pid).children(recursive=True)
    yield run_dir, controller
    for process in [*below, controller]:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    controller.wait()


def _until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_seed_gives_one_schedule_whose_rounds_hit_each_part_as_often_as_it_is_named() -> None:
    parts = ("replica", "replica", "trainer", "controller")
    drawn = [list(islice(schedule(7, 10.0, ("kill", "disk"), parts), 40)) for _ in range(2)]
    assert drawn[0] == drawn[1] != list(islice(schedule(8, 10.0, ("kill", "disk"), parts), 40))
    assert Counter(fault.part for fault in drawn[0]) == {
        "replica": 20,
        "trainer": 10,
        "controller": 10,
    }
    assert {fault.part for fault in drawn[0] if fault.kind == "disk"} == {"controller"}
    assert all(5.0 <= fault.wait_s <= 15.0 for fault in drawn[0])


def test_only_the_ranks_of_the_run_are_found(run) -> None:
    run_dir, controller = run
    assert find_controller(run_dir).pid == controller.pid
    below = psutil.Process(controller.pid).children
    _until(lambda: [one.name() for one in below(recursive=True)].count("sleep") == 3)
    assert list(processes_of(run_dir, "trainer")) == ["trainer-rank0"]
    replicas = processes_of(run_dir, "replica")
    assert sorted(replicas) == ["replica0-rank0", "replica1-rank0"]
    assert all(one.name() != "sleep" for one in replicas.values())
    assert processes_of(run_dir, "endpoint") == {}
    controller.stdin.close()
    controller.wait()
    assert find_controller(run_dir) is None  # the text in the lock is still there


def test_kill_and_stop(run) -> None:
    run_dir, _ = run
    replicas = processes_of(run_dir, "replica")
    chaos.disturb(replicas["replica0-rank0"], "kill", "replica")
    chaos.disturb(replicas["replica1-rank0"], "stop", "replica")
    _until(lambda: replicas["replica0-rank0"].status() == psutil.STATUS_ZOMBIE)
    _until(lambda: replicas["replica1-rank0"].status() == psutil.STATUS_STOPPED)


def test_a_controller_that_was_stopped_or_slow_goes_on(run, monkeypatch) -> None:
    monkeypatch.setattr(chaos, "_STOPPED_S", 0.05)
    monkeypatch.setattr(chaos, "_SLOW_S", 0.5)
    process = find_controller(run[0])
    for kind in ("stop", "slow"):
        chaos.disturb(process, kind, "controller")
        _until(lambda: process.status() == psutil.STATUS_SLEEPING)


def test_a_full_disk_ends_with_the_fault(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(chaos, "_FULL_S", 1.0)
    code = """
import sys, time
from pathlib import Path
path, errors = Path(sys.argv[1]), 0
print("started", flush=True)
end_s = time.monotonic() + 10
while time.monotonic() < end_s:
    try:
        path.write_bytes(bytes(4096))
        if errors:
            print("written again", flush=True)
            break
    except OSError as error:
        errors = error.errno
    time.sleep(0.01)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout.readline() == "started\n"
        chaos.disturb(psutil.Process(writer.pid), "disk", "controller")
        assert writer.stdout.readline() == "written again\n"


def test_disconnect_closes_connections_and_leaves_listeners_and_pairs() -> None:
    code = """
import socket
listener = socket.create_server(("127.0.0.1", 0))
one, other = socket.socketpair()
print(listener.getsockname()[1], flush=True)
first, _ = listener.accept()
print("cut" if first.recv(1) == b"" else "data", flush=True)
one.sendall(b"1")
second, _ = listener.accept()
print(other.recv(1), second.recv(1), flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as program:
        port = int(program.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as client:
            process = psutil.Process(program.pid)
            _until(lambda: len(process.net_connections("tcp")) == 2)
            chaos.disturb(process, "disconnect", "endpoint")
            assert program.stdout.readline() == "cut\n"
            assert client.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"2")
            assert program.stdout.readline() == "b'1' b'2'\n"


def test_a_run_is_found_while_its_controller_replaces_files_and_below_a_link(
    run, tmp_path, monkeypatch
) -> None:
    run_dir, controller = run
    open_files = psutil.Process.open_files

    def with_a_file_that_was_renamed(process):
        (opened, *_) = found = open_files(process)
        return [opened._replace(path=str(run_dir / "now.json.tmp")), *found]

    monkeypatch.setattr(psutil.Process, "open_files", with_a_file_that_was_renamed)
    assert find_controller(run_dir).pid == controller.pid
    (tmp_path / "link").symlink_to(run_dir)
    assert list(processes_of(tmp_path / "link", "trainer")) == ["trainer-rank0"]
