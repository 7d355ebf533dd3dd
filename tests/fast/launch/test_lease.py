"""The rules of a lease, on hosts with clocks of their own, paused at any step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Generator
from dataclasses import dataclass, field, replace

import pytest

from torchtitan_rl.launch.lease import (
    Contender,
    Entry,
    LeaseTimes,
    Ownership,
    Refused,
    Take,
    Wait,
)

TIMES = LeaseTimes()
OURS = Entry(number=3, content=b"0", token="us", process="process 1 on here")


def test_an_empty_or_released_folder_is_taken_at_once() -> None:
    assert Contender(TIMES).see(None, 5.0) == Take(1, 0.0)
    assert Contender(TIMES).see(replace(OURS, is_released=True), 5.0) == Take(4, 0.0)


def test_a_dead_owner_on_the_same_system_is_succeeded_at_once() -> None:
    dead = replace(OURS, place="boot 1, device 2")
    assert Contender(TIMES, dead_place="boot 1, device 2").see(dead, 5.0) == Take(4, 0.0)
    assert isinstance(Contender(TIMES, dead_place="boot 1, device 3").see(dead, 5.0), Wait)
    assert isinstance(Contender(TIMES).see(OURS, 5.0), Wait)


def test_an_owner_elsewhere_is_succeeded_after_it_did_not_move_for_long_enough() -> None:
    contender = Contender(TIMES)
    assert contender.see(OURS, 100.0) == Wait(OURS.process)
    assert contender.see(OURS, 100.0 + TIMES.silence_s - 0.1) == Wait(OURS.process)
    assert contender.see(OURS, 100.0 + TIMES.silence_s) == Take(4, TIMES.settle_s)


@pytest.mark.parametrize("moved", [replace(OURS, content=b"1"), replace(OURS, number=4)])
def test_an_owner_that_moves_refuses_the_contender(moved: Entry) -> None:
    contender = Contender(TIMES)
    contender.see(OURS, 0.0)
    assert contender.see(moved, 1.0) == Refused(OURS.process)


def test_an_owner_acts_for_a_while_after_each_look_and_never_after_it_was_succeeded() -> None:
    owner = Ownership(3, "us", TIMES)
    assert not owner.may_act(0.0)
    owner.looked(OURS, began_s=10.0)
    assert owner.may_act(10.0 + TIMES.valid_s - 0.1)
    assert not owner.may_act(10.0 + TIMES.valid_s)
    owner.looked(OURS, began_s=100.0)  # after a pause
    assert owner.may_act(100.0)
    owner.looked(replace(OURS, number=4, process="process 2 on there"), began_s=101.0)
    assert owner.is_lost
    assert owner.successor == "process 2 on there"
    owner.looked(OURS, began_s=102.0)
    assert not owner.may_act(102.0)


def test_an_entry_of_the_same_number_by_another_is_a_loss() -> None:
    for newest in (replace(OURS, token="them"), None):
        owner = Ownership(3, "us", TIMES)
        owner.looked(newest, began_s=0.0)
        assert owner.is_lost


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
            decision = contender.see(folder.newest(), self.clock())
            yield self.pause()
            match decision:
                case Refused():
                    return
                case Wait():
                    yield 1.0
                case Take(number, settle_s):
                    if number in folder.entries:
                        continue
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


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_no_owner_writes_after_a_later_one_did(first: int) -> None:
    successions = 0
    for seed in range(first, first + 500):
        numbers = [number for _, number in simulate(seed).writes]
        assert numbers == sorted(numbers), f"seed {seed}"
        successions += len(set(numbers)) > 1
    assert successions > 100  # the simulation is not about single owners


def test_a_lone_owner_is_never_lost() -> None:
    """However long it pauses."""
    folder = Folder()
    host = Host(
        name="host", folder=folder, chance=random.Random(1), speed=1, offset_s=0, dies_at_s=1e9
    )
    for delay in host.life():
        folder.now_s += delay
        if folder.now_s > 20_000:
            break
    assert folder.writes[-1][0] > 19_000
