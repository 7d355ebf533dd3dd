"""The rules of a lease, on hosts with clocks of their own that are paused at any step; the lease
between processes, without a kernel lock, as on hosts that it does not reach; and both together."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from torchtitan_rl.errors import ConfigError, RunTakenOverError
from torchtitan_rl.launch.lease import (
    LEASE_FOLDER,
    Contender,
    Entry,
    Lease,
    LeaseTimes,
    Ownership,
    RunInUseError,
    hold_run,
    lock_errors,
)

TIMES = LeaseTimes()
OURS = Entry(number=3, content=b"0", token="us", process="process 1 on here")


def test_a_dead_owner_on_the_same_system_is_succeeded_at_once() -> None:
    dead = replace(OURS, place="boot 1, device 2")
    assert Contender(TIMES, dead_place="boot 1, device 2").see(dead, 5.0) == 0.0
    assert Contender(TIMES, dead_place="boot 1, device 3").see(dead, 5.0) is None
    assert Contender(TIMES).see(OURS, 5.0) is None


# A simulation: each host is a generator that yields for how long it sleeps, and every access to the
# shared folder is one step, before and after which it may be paused.


@dataclass
class Folder:
    entries: dict[int, Entry] = field(default_factory=dict)
    writes: list[tuple[float, int]] = field(default_factory=list)  # real time, number
    now_s: float = 0.0

    def newest(self) -> Entry | None:
        return self.entries[max(self.entries)] if self.entries else None


@dataclass
class Host:
    """``speed`` and ``offset_s`` of its clock; ``dies_at_s`` in real time."""

    name: str
    folder: Folder
    chance: random.Random
    speed: float
    offset_s: float
    dies_at_s: float

    def clock(self) -> float:
        return self.offset_s + self.speed * self.folder.now_s

    def pause(self) -> float:
        """Mostly nothing, at times a slow file server, rarely a stopped process."""
        kind = self.chance.random()
        if kind < 0.1:
            return self.chance.uniform(0, 40)
        return self.chance.uniform(0, 5 if kind < 0.2 else 0.02)

    def life(self) -> Generator[float, None, None]:
        folder, contender = self.folder, Contender(TIMES)
        while True:
            yield self.pause()
            newest = folder.newest()
            number = 1 if newest is None else newest.number + 1
            try:
                settle_s = contender.see(newest, self.clock())
            except RunInUseError:
                return
            yield self.pause()
            if settle_s is None:
                yield 1.0
            elif number not in folder.entries:
                self.write_entry(number, 0)
                yield settle_s / self.speed
                yield from self.own(number)
                return

    def write_entry(self, number: int, beat: int) -> None:
        self.folder.entries[number] = Entry(
            number=number, content=b"%d" % beat, token=self.name, process=self.name
        )

    def own(self, number: int) -> Generator[float, None, None]:
        owner = Ownership(number, self.name, TIMES)
        for beat in itertools.count(1):
            began_s = self.clock()
            yield self.pause()
            owner.looked(self.folder.newest(), began_s=began_s)
            yield self.pause()
            if owner.is_lost:
                return
            self.write_entry(number, beat)
            for _ in range(3):
                yield TIMES.beat_s / 3
                if owner.may_act(self.clock()):  # and writes at once
                    self.folder.writes.append((self.folder.now_s, number))


def simulate(seed: int) -> Folder:
    chance = random.Random(seed)
    folder = Folder()
    running: list[tuple[float, Host, Generator[float, None, None]]] = []
    starts = [chance.uniform(0, 300) for _ in range(chance.randint(2, 8))]
    for number, start_s in enumerate([0.0, 0.0, *starts]):
        host = Host(
            name=f"host {number}",
            folder=folder,
            chance=chance,
            speed=chance.uniform(0.97, 1.03),
            offset_s=chance.uniform(-1e6, 1e6),
            dies_at_s=start_s + chance.expovariate(1 / 120),
        )
        running.append((start_s, host, host.life()))
    while running:
        running.sort(key=lambda one: one[0])
        at_s, host, life = running.pop(0)
        folder.now_s = at_s
        if at_s < min(host.dies_at_s, 1000.0) and (delay := next(life, None)) is not None:
            running.append((at_s + delay, host, life))
    return folder


@pytest.mark.parametrize("seeds", [300, pytest.param(2000, marks=pytest.mark.soak)])
def test_no_owner_writes_after_a_later_one_did(seeds: int) -> None:
    successions = 0
    for seed in range(seeds):
        numbers = [number for _, number in simulate(seed).writes]
        assert numbers == sorted(numbers), f"seed {seed}"
        successions += len(set(numbers)) > 1
    assert successions > seeds / 5  # the simulation is not about single owners


SHORT = LeaseTimes(beat_s=0.4, valid_s=1.6, silence_s=2.0, settle_s=2.0)
_OWN = """
import sys, time
from pathlib import Path
from torchtitan_rl.errors import RunTakenOverError
from torchtitan_rl.launch.lease import Lease, LeaseTimes

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
        with pytest.raises(RunInUseError, match=rf"^process {first.pid} on "):
            Lease(tmp_path).require_silence(has_kernel_lock=False)


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


def test_an_owner_whose_lease_was_removed_by_hand_ends_and_says_so(tmp_path: Path) -> None:
    """To write it again is not safe: who finds no entry owns the folder at once."""
    lease = Lease(tmp_path, SHORT)
    lease.acquire(has_kernel_lock=False)
    shutil.rmtree(tmp_path / LEASE_FOLDER)
    with pytest.raises(RunTakenOverError, match=r"run\.lease was removed"):
        asyncio.run(lease.wait_until_lost())
    lease.release()
    assert not (tmp_path / LEASE_FOLDER).exists()


_HOLD = """
import os, sys, time
from pathlib import Path
from torchtitan_rl.launch.lease import hold_run
with hold_run(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        print(os.getpid(), flush=True)
    time.sleep(600)
"""


def test_a_second_run_in_a_folder_is_refused_with_the_first_ones_process(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "run"
    with hold_run(folder):
        assert folder.is_dir()
        with pytest.raises(ConfigError) as refused, hold_run(folder):
            pass
        (message,) = refused.value.errors
        assert message.startswith("name is run: ")
        assert f"process {os.getpid()} on {socket.gethostname()} runs in {folder}" in message
        assert lock_errors(folder) == [message]
    assert lock_errors(folder) == []
    with hold_run(folder):
        pass


def test_looking_changes_nothing(tmp_path: Path) -> None:
    assert lock_errors(tmp_path / "run") == []
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_leaves_no_lock_not_even_with_its_forked_children(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        (message,) = lock_errors(tmp_path)
        assert f"process {holder.pid} on" in message
        holder.kill()
        holder.wait()
        with hold_run(tmp_path):
            os.kill(child, 0)  # it lives
    finally:
        os.kill(child, signal.SIGKILL)
        holder.stdout.close()
