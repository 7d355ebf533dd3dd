"""The lease between processes, without a kernel lock, as on hosts that it does not reach."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchtitan_rl.errors import RunTakenOverError
from torchtitan_rl.launch.lease import LEASE_FOLDER, Lease, LeaseTimes, RunInUseError, beating_owner

SHORT = LeaseTimes(beat_s=0.4, valid_s=1.6, silence_s=2.0, settle_s=2.0)
_OWN = """
import sys, time
from pathlib import Path
from torchtitan_rl.errors import RunTakenOverError
from torchtitan_rl.launch.lease import LeaseTimes
from torchtitan_rl.launch.lease import Lease

run_dir = Path(sys.argv[1])
lease = Lease(run_dir, LeaseTimes(beat_s=0.4, valid_s=1.6, silence_s=2.0, settle_s=2.0))
lease.acquire(has_kernel_lock=False)
with open(run_dir / "journal", "a", buffering=1) as journal:
    print("owned", flush=True)
    while True:
        try:
            lease.check()
        except RunTakenOverError as error:
            print(error, flush=True)
            break
        journal.write(f"{sys.argv[2]}\\n")
        time.sleep(0.01)
"""


@contextmanager
def owner(run_dir: Path, name: str) -> Iterator[subprocess.Popen[str]]:
    """A process that writes into the folder as long as it owns it."""
    with subprocess.Popen(
        [sys.executable, "-c", _OWN, str(run_dir), name], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "owned\n"
            yield process
        finally:
            process.kill()


def entries(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / LEASE_FOLDER).iterdir() if path.suffix)


def stop_once_it_writes(process: subprocess.Popen[str], journal: Path) -> None:
    while not (journal.exists() and journal.stat().st_size):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGSTOP)


def test_a_second_owner_is_refused_while_the_first_one_beats(tmp_path: Path) -> None:
    with owner(tmp_path, "first") as first:
        with pytest.raises(RunInUseError, match=rf"^process {first.pid} on "):
            Lease(tmp_path, SHORT).acquire(has_kernel_lock=False)
        assert beating_owner(tmp_path, has_kernel_lock=False).startswith(f"process {first.pid} on")


def test_a_released_folder_is_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        lease = Lease(tmp_path, SHORT)
        lease.acquire(has_kernel_lock=False)
        lease.check()
        lease.release()
        assert beating_owner(tmp_path, has_kernel_lock=False) == ""
    assert entries(tmp_path) == ["000003.json"]
    assert not caplog.messages


def test_a_killed_owner_is_succeeded_at_once_where_the_kernel_lock_says_it_is_dead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with owner(tmp_path, "first"):
        pass
    lease = Lease(tmp_path, SHORT)
    lease.acquire(has_kernel_lock=True)
    lease.release()
    assert not caplog.messages


def test_a_killed_owner_elsewhere_is_succeeded_after_a_silence_that_is_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with owner(tmp_path, "first") as first:
        pass
    lease = Lease(tmp_path, SHORT)
    lease.acquire(has_kernel_lock=False)
    lease.check()
    lease.release()
    (message,) = caplog.messages
    assert message.startswith(f"process {first.pid} on ")
    assert "waiting up to 4 s" in message


def test_a_stopped_owner_that_is_taken_over_writes_nothing_more(tmp_path: Path) -> None:
    with owner(tmp_path, "first") as first:
        stop_once_it_writes(first, tmp_path / "journal")
        with owner(tmp_path, "second") as second:
            first.send_signal(signal.SIGCONT)
            assert first.stdout is not None
            assert f"process {second.pid} on " in first.stdout.readline()
            assert first.wait(timeout=60) == 0
    names = (tmp_path / "journal").read_text().split()
    assert names == sorted(names)
    assert set(names) == {"first", "second"}


def test_a_stopped_owner_that_no_one_takes_over_continues(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    with owner(tmp_path, "first") as first:
        stop_once_it_writes(first, journal)
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(timeout=2 * SHORT.valid_s)
        size = journal.stat().st_size
        first.send_signal(signal.SIGCONT)
        while journal.stat().st_size == size:
            assert first.poll() is None


def test_an_owner_whose_lease_was_removed_by_hand_ends_and_says_so(tmp_path: Path) -> None:
    """To write it again is not safe: who finds no entry owns the folder at once."""
    lease = Lease(tmp_path, SHORT)
    lease.acquire(has_kernel_lock=False)
    shutil.rmtree(tmp_path / LEASE_FOLDER)
    with pytest.raises(RunTakenOverError, match=r"run\.lease was removed"):
        asyncio.run(lease.wait_until_lost())
    lease.release()
    assert not (tmp_path / LEASE_FOLDER).exists()


def test_a_loss_ends_the_wait_for_it(tmp_path: Path) -> None:
    lease = Lease(tmp_path, SHORT)
    lease.acquire(has_kernel_lock=False)
    (tmp_path / LEASE_FOLDER / "000002.json").write_text('{"token": "theirs"}')
    with pytest.raises(RunTakenOverError, match="another process has taken over"):
        asyncio.run(lease.wait_until_lost())
    with pytest.raises(RunTakenOverError):
        lease.check()
    lease.release()
    assert entries(tmp_path) == ["000001.json", "000002.json"]
