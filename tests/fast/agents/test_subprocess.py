"""Programs of environments: results, limits, and that all their processes end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_rl.processes import CommandError, run_command

ROOT = Path(__file__).parents[3]
# Writes its pid to the file named by its argument and sleeps, as a daemon: forked twice, in a
# session of its own, so that neither its parent nor a process group leads to it.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open(sys.argv[1] + ".new", "w") as file:
            file.write(str(os.getpid()))
        os.rename(sys.argv[1] + ".new", sys.argv[1])
        time.sleep(1000)
    os._exit(0)
os.wait()
"""


def run(*argv: str, timeout_s: float = 60.0, **options):
    return asyncio.run(run_command(argv, timeout_s=timeout_s, **options))


def daemon_and(path: Path, then: str) -> tuple[str, ...]:
    """A program that starts the daemon, waits until it runs, and does something more."""
    wait = f"while [ ! -e {path} ]; do sleep 0.01; done; {then}"
    return ("sh", "-c", f'"$0" -I -S -c "$1" {path}; {wait}', sys.executable, DAEMON)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # a zombie only waits for init


def wait_until(condition) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_input_larger_than_a_pipe_may_be_ignored():
    assert run("true", stdin=bytes(1 << 20)).exit_code == 0
    assert run("sh", "-c", "exec 0<&-; exit 4", stdin=bytes(1 << 20)).exit_code == 4


def test_output_beyond_the_limit_is_dropped_and_reported():
    result = run("sh", "-c", "head -c 300000 /dev/zero; echo x >&2", max_output_bytes=1000)
    assert (result.exit_code, result.stdout, result.stderr) == (0, bytes(1000), b"x\n")
    assert result.truncated


@pytest.mark.parametrize(
    ("argv", "cwd"), [(("/no/such/program",), "."), (("a\0b",), "."), ((), "."), (("true",), "/no")]
)
def test_a_command_that_cannot_start_is_an_error(argv, cwd):
    with pytest.raises(CommandError):
        run(*argv, cwd=cwd)


def test_a_daemon_is_gone_when_its_command_has_ended(tmp_path):
    result = run(*daemon_and(tmp_path / "pid", "exit 0"))
    assert result.exit_code == 0
    assert not is_alive(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_at_the_timeout_everything_is_killed_and_the_output_kept(tmp_path):
    for timeout_s in (1, 5, 25):  # a busy machine may need longer to get there at all
        result = run(*daemon_and(tmp_path / "pid", "echo kept; sleep 1000"), timeout_s=timeout_s)
        if result.stdout:
            break
    assert (result.exit_code, result.signal, result.timed_out) == (None, None, True)
    assert result.stdout == b"kept\n"
    assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_cancelled_command_is_dead_before_the_cancellation_is_raised(tmp_path):
    path = tmp_path / "pid"

    async def scenario():
        task = asyncio.create_task(run_command(daemon_and(path, "sleep 1000"), timeout_s=10_000))
        while not path.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # a second cancellation changes nothing
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert not is_alive(int(path.read_text()))


PARENT = """
import asyncio, os, sys
from torchtitan_rl.processes import run_command
if sys.argv[1] == "heir":  # a forked child keeps our end of the shim's link open
    async def fork_later():
        await asyncio.sleep(0.1)
        if os.fork() == 0:
            os.setsid()
            os.execvp("sh", ["sh", "-c", "sleep 1000 & echo $! > " + sys.argv[2] + "; wait"])
async def main():
    if sys.argv[1] == "heir":
        import socket
        pair = socket.socketpair
        def inheritable(*args):
            ours, theirs = pair(*args)
            ours.set_inheritable(True)
            return ours, theirs
        socket.socketpair = inheritable
        later = asyncio.create_task(fork_later())
    await run_command(sys.argv[3:], timeout_s=600)
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "heir"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_parent_dies_its_commands_and_their_daemons_die(tmp_path, kind, number):
    """Also where another process holds our end of the link, so that its closing is never seen."""
    pid_file, heir_file = tmp_path / "pid", tmp_path / "heir"
    parent = subprocess.Popen(
        [
            *(sys.executable, "-c", PARENT, kind, str(heir_file)),
            *daemon_and(pid_file, "sleep 1000"),
        ],
        cwd=ROOT,
    )
    heir = 0
    try:
        assert wait_until(pid_file.exists)
        if kind == "heir":
            assert wait_until(lambda: heir_file.exists() and heir_file.read_text())
            heir = int(heir_file.read_text())
        daemon = int(pid_file.read_text())
        assert is_alive(daemon)
        parent.send_signal(number)
        parent.wait()
        assert wait_until(lambda: not is_alive(daemon))
        assert not heir or is_alive(heir)
    finally:
        parent.kill()
        parent.wait()
        if heir:
            os.kill(heir, signal.SIGKILL)


def test_a_command_that_kills_its_shim_is_an_error_and_its_group_is_killed(tmp_path):
    with pytest.raises(CommandError, match="its shim was killed"):
        run("sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/pid; kill -KILL $PPID; wait")
    assert wait_until(lambda: not is_alive(int((tmp_path / "pid").read_text())))
