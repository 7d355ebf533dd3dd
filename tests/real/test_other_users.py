"""A run of all kinds of processes: tensor-parallel replicas, a sharded trainer, an endpoint and a
sandbox, started by torchrun, its weights over RDMA. What it computes, and what another user of the
machine can do with all that its processes listen on and write."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.real.runs import (
    ROOT,
    SMALL,
    Run,
    read_metrics,
    read_rollouts,
    require_audit,
)
from tests.real.served import require_end_by_loss_of_endpoint
from tests.support.other_user import USER_ID, as_other_user, listening_sockets, needs_root, reach
from torchtitan_rl import SandboxConfig

SHARED = (Path("/dev/shm"), Path("/tmp"))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, Path]]:
    """The run and its folder; files are for all unless the run says no."""
    kinds = ("namespaces", "landlock")
    allowed = [kind for kind in kinds if not SandboxConfig(isolation=kind).errors("sandbox")]
    if not allowed:
        pytest.skip("this machine allows neither namespaces nor Landlock")
    root = tmp_path_factory.mktemp("run")
    root.chmod(0o755)
    words = [
        *(str(ROOT / "configs" / "code_interpreter_tiny.py"), *SMALL, "--num-steps", "1000"),
        *("--task.sandbox.isolation", allowed[0], "--endpoint.enabled"),
        *("--endpoint.max-restarts", "0"),
        *("--generator.replicas", "1", "--generator.tensor-parallel", "2"),
        *("--trainer.data-parallel-shard", "2", "--trainer.threads", "1"),
        *("--weight-sync.transport", "rdma", "--weight-sync.mode", "drain"),
        *("--output-dir", str(root), "--name", "run"),
    ]
    before = os.umask(0)
    run = Run(words, log=root / "log", module="torchrun")
    os.umask(before)
    run.wait_until(lambda: len(read_metrics(root / "run")) > 2, "two steps")
    yield run, root / "run"
    run.kill_all()


def test_parallel_parts_agree_on_tokens_and_weights(running: tuple[Run, Path]) -> None:
    run, run_dir = running
    assert run.listening_on() == {"127.0.0.1"}
    rows = read_metrics(run_dir)
    assert [row["policy/version"] for row in rows] == list(range(len(rows)))
    for row in rows[1:]:
        assert row["trainer/logprob_diff_max"] < 3e-5
        assert row["train/ended_env_error"] == 0
        assert row["train/task/tool_calls"] > 0
        assert row["train/rollouts"] == 16


def test_what_a_program_printed_is_what_the_policy_read(running: tuple[Run, Path]) -> None:
    num_read = 0
    for rollout in read_rollouts(running[1]):
        right_code = f"print({rollout['problem']['expression']})"
        messages = rollout["messages"]
        for message, before in zip(messages[1:], messages, strict=False):
            if message["role"] == "tool":
                num_read += 1
                if code_of(before) == right_code:
                    assert message["content"] == rollout["problem"]["answer"]
    assert num_read > 0


def code_of(message: dict[str, Any]) -> str | None:
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if isinstance(arguments, dict):
            return str(arguments.get("code"))
    return None


@needs_root
def test_no_process_of_a_run_serves_another_user(running) -> None:
    run, _ = running
    found = {
        address: (family, " ".join(process.cmdline())[-80:])
        for process in ours(run)
        for family, address in listening_sockets(process)
    }

    def try_all() -> str:
        with ThreadPoolExecutor(16) as pool:
            tried = pool.map(lambda address: reach(found[address][0], address), found)
            return " ".join(tried)

    outcomes = dict(zip(found, as_other_user(try_all).split(), strict=True))
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
    (controller,) = (
        process for process in ours(run) if "torchtitan_rl.commands.torchrun" in process.cmdline()
    )
    addresses = [name for _, name in listening_sockets(controller) if isinstance(name, str)]
    assert addresses
    attempts = [
        subprocess.Popen(  # together: each waits for 20 s
            [
                sys.executable,
                "-m",
                "tests.real.attach_as_other_user",
                f"ipc://{name}",
                f"{USER_ID}",
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in (address.replace(chr(0), "@") for address in addresses)
    ]
    for attempt in attempts:
        said, _ = attempt.communicate(timeout=120.0)
        assert attempt.returncode == 0
        assert "refused: " in said, said


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
    assert [path for path in written if is_for_all(path)] == []


def ours(run: Run) -> list[psutil.Process]:
    """All but torchrun itself, whose store takes connections from everywhere."""
    return [one for one in run.processes() if "torch.distributed.run" not in one.cmdline()]


def files_of(process: psutil.Process) -> Iterator[Path]:
    """That are open or mapped, and still have a name."""
    with contextlib.suppress(psutil.Error, OSError):
        folder = Path(f"/proc/{process.pid}")
        names = [os.readlink(path) for path in (folder / "fd").iterdir()]
        lines = (folder / "maps").read_text().splitlines()
        names += [line.split(maxsplit=5)[5] for line in lines if line.count("/")]
        yield from (path for path in map(Path, names) if path.exists())


def is_for_all(path: Path) -> bool:
    """Whether other users may write to it."""
    with contextlib.suppress(FileNotFoundError):
        return bool(path.lstat().st_mode & 0o002)
    return False


def is_closed(path: Path, run_dir: Path) -> bool:
    """Whether it is the run's own folder's, or only its owner can get at it."""
    if path.is_relative_to(run_dir):
        return True
    with contextlib.suppress(FileNotFoundError):  # the run goes on and replaces it
        return any(one.stat().st_mode & 0o077 == 0 for one in (path, *path.parents))
    return True


def test_a_killed_endpoint_ends_the_run_with_1_and_leaves_no_process(
    running: tuple[Run, Path],
) -> None:
    run, run_dir = running
    require_end_by_loss_of_endpoint(run)
    require_audit(run_dir)
    for process in psutil.process_iter(["cmdline", "ppid"]):
        is_ours = str(ROOT) in (process.info["cmdline"] or ())
        is_zygote = "sandbox.zygote" in " ".join(process.info["cmdline"] or ())
        assert not (is_ours and is_zygote and process.info["ppid"] == 1)  # others have a parent
