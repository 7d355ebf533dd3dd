"""Looking for a lost host."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.virtual_clock import run_virtually
from torchtitan_rl.backends.monarch import hosts as hosts_module
from torchtitan_rl.backends.monarch.host_agent import HostAnswer, describe_host
from torchtitan_rl.backends.monarch.host_watch import HostWatch
from torchtitan_rl.backends.monarch.hosts import Host, Hosts, NotAttachedError, _Wanted
from torchtitan_rl.errors import ConfigError, HostLostError, HostsBusyError
from torchtitan_rl.failures import Failure, Sign
from torchtitan_rl.launch.workers import CONTROLLER_LOST_S


async def stay(index: int) -> None:
    """Nothing runs on the host."""


class LostHosts:
    """One lost host, and what comes of each attempt to attach it again."""

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes = list(outcomes)

    def far(self) -> list[Host]:
        return []

    async def attach_again(self, index: int) -> Any:
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def look_for(*outcomes: Any) -> tuple[Any, list[str]]:
    """What is found, and what was said."""
    said: list[str] = []
    hosts = LostHosts(*outcomes)
    watch = HostWatch(
        cast(Hosts, hosts),
        log_dir=Path(),
        trace_dir=None,
        say=said.append,
        on_lost=lambda index, cause: None,
        on_leaving=stay,
    )
    found = run_virtually(watch._look_for(0))
    assert hosts.outcomes == []
    return found, said


def test_a_host_that_serves_another_run_is_looked_for_until_that_has_ended() -> None:
    busy = HostsBusyError("it serves another run")
    found, said = look_for(None, busy, busy, None, "the host")
    assert found == "the host"
    assert said == ["host0 serves another run, and is used again once that has ended"]


def test_a_host_with_other_code_is_given_up() -> None:
    found, said = look_for(None, ConfigError("it has torch 1.0"))
    assert found is None
    assert said == ["host0 is back and cannot be used: it has torch 1.0"]


def test_nothing_waits_for_a_host_that_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    host = cast(Any, SimpleNamespace(index=0, name="there"))
    hosts = SimpleNamespace(
        far=lambda: [host], lose=lambda host: None, can_return=True, attach_again=None
    )

    async def refuse(index: int) -> None:
        raise ConfigError("it has torch 1.0")

    async def is_cut_off(host: Host) -> HostLostError:
        return HostLostError("no answer for 15 s")

    async def play() -> None:
        hosts.attach_again = refuse
        watch = HostWatch(
            cast(Hosts, hosts),
            log_dir=Path(),
            trace_dir=None,
            say=lambda line: None,
            on_lost=lambda index, cause: None,
            on_leaving=stay,
        )
        monkeypatch.setattr(watch, "_beat_until_lost", is_cut_off)
        waiting = asyncio.create_task(watch.wait_until_there(0))
        await watch._watch(host)
        for asked in (waiting, watch.wait_until_there(0)):
            with pytest.raises(HostLostError, match="host0 is lost and cannot return"):
                await asked
        assert not await watch.answers(0)

    run_virtually(play())


def test_a_host_answers_after_two_beats_and_does_not_once_it_is_lost() -> None:
    async def play(num_beats: int) -> bool:
        agent = cast(Any, "there")
        host = Host(index=0, name="there", ip="127.0.0.77", mesh=cast(Any, None), agent=agent)
        hosts = Hosts([host], wanted=_Wanted(checkpoint="", here=describe_host("local", "")))
        watch = HostWatch(
            hosts,
            log_dir=Path(),
            trace_dir=None,
            say=print,
            on_lost=lambda index, cause: None,
            on_leaving=stay,
        )
        asking = asyncio.create_task(watch.answers(0))
        for _ in range(num_beats):
            await asyncio.sleep(1.0)
            assert not asking.done()
            watch._note_answer(0)
        await asyncio.sleep(1.0)
        if not asking.done():
            watch.hosts.lose(host)
            watch._lost[0].set()
        assert watch.is_lost(0) is not await asking
        return await asking

    assert run_virtually(play(2))
    assert not run_virtually(play(1))


class Agent:
    """The agent of a host whose worker is told to end after its second heartbeat; it ends when the
    run does, or after ``num_beats``."""

    def __init__(self, num_beats: int) -> None:
        self.num_beats, self.num_left, self.is_ended = 0, num_beats, False
        self.beat = SimpleNamespace(call_one=self._beat)
        self.end_run = SimpleNamespace(call_one=self._end_run)
        self.files_there = SimpleNamespace(call_one=self._nothing)
        self.read_new = SimpleNamespace(call_one=self._nothing)

    async def _beat(self) -> tuple[int, bool]:
        self.num_beats += 1
        if self.is_ended or self.num_beats > self.num_left:
            raise TimeoutError
        return time.time_ns(), self.num_beats > 2

    async def _end_run(self) -> bool:
        self.is_ended = True
        return True

    async def _nothing(self, *_: Any) -> None:
        return None  # the folder is shared


@pytest.mark.parametrize("goes_first", [False, True])
def test_the_run_leaves_a_host_that_is_about_to_end_and_uses_it_again_when_it_is_back(
    tmp_path: Path, goes_first: bool
) -> None:
    said, happened, failures = list[str](), list[str](), list[Failure]()

    async def play() -> None:
        can_leave = asyncio.Event()
        agents = [Agent(9 if goes_first else 99), Agent(99)]
        agents[1].num_beats = -99  # nothing more is said
        made = [
            Host(index=0, name="there", ip="", mesh=cast(Any, None), agent=agent)
            for agent in agents
        ]

        async def attach_again(index: int) -> Host:
            return made[1]

        async def leave(index: int) -> None:
            happened.append("leaving")
            await can_leave.wait()
            happened.append(f"left, and its run goes on: {not agents[0].is_ended}")

        hosts = Hosts(made[:1])
        hosts.attach_again = attach_again  # type: ignore[method-assign]
        async with HostWatch(
            hosts,
            log_dir=tmp_path,
            trace_dir=None,
            say=said.append,
            on_lost=lambda index, cause: happened.append(cause),
            on_leaving=leave,
            on_failure=failures.append,
        ) as watch:
            await asyncio.wait_for(watch.wait_until_there(0), 60.0)
            while not happened:
                await asyncio.sleep(0.1)
            assert watch.is_leaving(0)
            back = asyncio.create_task(watch.wait_until_there(0))
            await asyncio.sleep(10.0)
            assert not back.done()
            if not goes_first:
                can_leave.set()
            await asyncio.wait_for(back, 60.0)
            assert agents[0].is_ended is not goes_first
            assert not watch.is_leaving(0)

    run_virtually(play())
    (failure,) = failures
    assert said[0] == "host0 (there) is about to end (SIGTERM): the run leaves it"
    if goes_first:
        assert happened == ["leaving", "its agent does not answer (TimeoutError)"]
        assert failure.sign is Sign.HOST
    else:
        told = "its worker was told to end (SIGTERM)"
        assert happened == ["leaving", "left, and its run goes on: True", told]
        assert said[1:] == [f"host0 (there) has left: {told}", "host0 is back"]
        assert (failure.sign, failure.tokens_again) == (Sign.ANNOUNCED, 0)
        assert failure.describe().startswith("departure of host0: seen as announced, restarted")


class Attempts(Hosts):
    """One lost host, whose worker listens or not. Every attempt to attach it fails."""

    def __init__(self) -> None:
        host = Host(index=0, name="tcp://10.0.0.2:26600", ip="10.0.0.2", mesh=cast(Any, None))
        super().__init__([host], wanted=_Wanted(checkpoint="", here=describe_host("local", "")))
        self.listens = True
        self.error: Exception = TimeoutError()
        self.lose(host)

    async def _attached(self, index: int, name: str) -> Host:
        raise self.error

    def attempt(self) -> str:
        """What a look at the host says; empty if there was no attempt, or nothing to say."""
        try:
            assert asyncio.run(self.attach_again(0)) is None
        except (NotAttachedError, HostsBusyError) as error:
            return str(error)
        return ""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, in one element."""
    now_s = [1000.0]
    monkeypatch.setattr(hosts_module.time, "monotonic", lambda: now_s[0])
    return now_s


@pytest.fixture
def hosts(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> Attempts:
    found = Attempts()
    monkeypatch.setattr(hosts_module, "accepts", lambda address: found.listens)
    return found


def test_a_lost_host_is_tried_soon_after_it_listens_and_then_with_growing_pauses(
    hosts: Attempts, clock: list[float]
) -> None:
    for _ in range(2):
        hosts.listens = False
        clock[0] += 1000.0
        assert hosts.attempt() == ""
        hosts.listens = True
        assert hosts.attempt() == ""  # it has only begun to listen
        clock[0] += 3.0
        pauses = []
        for _ in range(7):
            said = hosts.attempt()
            assert said.startswith("was not attached (no answer); it is tried again in ")
            pauses.append(float(said.split()[-2]))
            clock[0] += pauses[-1] - 0.1
            assert hosts.attempt() == ""
            clock[0] += 0.2
        assert pauses == [10, 20, 40, 80, 160, 320, 320]


def test_a_worker_that_has_not_yet_ended_this_run_is_not_taken_for_one_of_another_run(
    hosts: Attempts, clock: list[float]
) -> None:
    hosts.error = HostsBusyError("it serves another run")
    said = {}
    for second in range(60):
        clock[0] += 1.0
        said[second] = hosts.attempt()
    assert not any(said[second] for second in range(int(CONTROLLER_LOST_S)))
    assert "it serves another run" in said.values()


def test_a_worker_claimed_by_a_failed_attempt_is_not_taken_for_one_of_another_run(
    hosts: Attempts, clock: list[float]
) -> None:
    clock[0] += 1000.0
    assert "was not attached" in hosts.attempt()
    hosts.error = HostsBusyError("it serves another run")
    clock[0] += 20.0
    assert hosts.attempt() == ""
    clock[0] += CONTROLLER_LOST_S + 10.0
    assert hosts.attempt() == "it serves another run"


def test_a_host_whose_policy_cannot_be_read_is_tried_again(
    hosts: Attempts, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    async def contact(name: str) -> Any:
        return SimpleNamespace(initialized=asyncio.sleep(0))

    async def answer(checkpoint: str) -> HostAnswer:
        here = describe_host("local", "")
        return replace(here, policy="", policy_error="/mnt/policy: no such folder")

    async def end_run() -> bool:
        ended.append(True)
        return True

    agent = SimpleNamespace(
        answer=SimpleNamespace(call_one=answer), end_run=SimpleNamespace(call_one=end_run)
    )
    monkeypatch.setattr(hosts_module, "_contact_again", contact)
    monkeypatch.setattr(hosts_module, "_spawn_agent", lambda mesh, name: agent)
    monkeypatch.setattr(Attempts, "_attached", Hosts._attached)
    clock[0] += 1000.0
    expected = "was not attached (/mnt/policy: no such folder); it is tried again in 10 s"
    assert hosts.attempt() == expected
    assert ended == [True]
