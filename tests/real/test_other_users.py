"""Another user of the machine, and all that the processes of a run listen on and write."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.real.runs import ROOT, Run, read_metrics
from tests.support.other_user import USER_ID, as_other_user, listening_sockets, needs_root, reach

SHARED = (Path("/dev/shm"), Path("/tmp"))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Path]]:
    """A run of all kinds of processes, and its folder; files are for all unless it says no."""
    root = tmp_path_factory.mktemp("run")
    root.chmod(0o755)
    words = [
        *(str(ROOT / "configs" / "code_interpreter_tiny.py"), "--metrics.progress", "plain"),
        *("--rollout.groups-per-step", "2", "--rollout.group-size", "4"),
        *("--evaluation.num-problems", "2", "--evaluation.every", "0", "--num-steps", "1000"),
        *("--generator.replicas", "1", "--generator.tensor-parallel", "2"),
        *("--trainer.data-parallel-shard", "2", "--trainer.threads", "1", "--endpoint.enabled"),
        *("--output-dir", str(root), "--name", "run"),
    ]
    before = os.umask(0)
    run = Run(words, log=root / "log")
    os.umask(before)
    run.wait_until(lambda: len(read_metrics(root / "run")) > 1, "a step")
    yield run, root / "run"
    run.kill_all()


@needs_root
def test_no_process_of_a_run_serves_another_user(running) -> None:
    run, _ = running
    found = {
        address: (family, " ".join(process.cmdline())[-80:])
        for process in run.processes()
        for family, address in listening_sockets(process)
    }
    outcomes = {
        address: as_other_user(lambda: reach(family, address))  # noqa: B023
        for address, (family, _) in found.items()
    }
    wanted = {
        address: "refused" if family == socket.AF_UNIX else "closed"
        for address, (family, _) in found.items()
    }
    assert outcomes == wanted, found
    assert {*wanted.values()} == {"refused", "closed"}
    base_url = re.search(r"endpoint: (\S+)", run.log.read_text())
    assert base_url is not None
    assert httpx.get(f"{base_url[1]}/models").status_code == 200  # for this user
    assert run.process.poll() is None


@needs_root
def test_another_user_does_not_attach_to_the_controller(running) -> None:
    run, _ = running
    controller = psutil.Process(run.process.pid)
    addresses = [name for _, name in listening_sockets(controller) if isinstance(name, str)]
    assert addresses
    for address in addresses:
        words = [f"ipc://{address.replace(chr(0), '@')}", f"{USER_ID}"]
        done = subprocess.run(
            [sys.executable, "-m", "tests.real.attach_as_other_user", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert "refused: " in done.stdout, done.stdout


def test_what_a_run_keeps_in_shared_folders_is_closed_to_others(running) -> None:
    run, run_dir = running
    opened = {path for process in run.processes() for path in files_of(process)}
    installed = ROOT, Path(sys.prefix)  # which may be in /tmp
    shared = {
        path
        for path in opened
        if any(path.is_relative_to(root) for root in SHARED)
        and not any(path.is_relative_to(root) for root in installed)
    }
    assert {path for path in shared - {run.log} if not is_closed(path, run_dir)} == set()
    written = [run_dir, *run_dir.rglob("*")]
    assert len(written) > 10
    assert [path for path in written if path.lstat().st_mode & 0o002] == []


def files_of(process: psutil.Process) -> Iterator[Path]:
    """That are open or mapped, and still have a name."""
    with contextlib.suppress(psutil.Error, OSError):
        folder = Path(f"/proc/{process.pid}")
        names = [os.readlink(path) for path in (folder / "fd").iterdir()]
        lines = (folder / "maps").read_text().splitlines()
        names += [line.split(maxsplit=5)[5] for line in lines if line.count("/")]
        yield from (path for path in map(Path, names) if path.exists())


def is_closed(path: Path, run_dir: Path) -> bool:
    """Whether it is the run's own folder's, or only its owner can get at it."""
    if path.is_relative_to(run_dir):
        return True
    return any(one.stat().st_mode & 0o077 == 0 for one in (path, *path.parents))
