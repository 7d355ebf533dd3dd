"""Looking for a lost host."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any, cast

from tests.support.virtual_clock import run_virtually
from torchtitan_rl.backends.monarch.host_agent import describe_host
from torchtitan_rl.backends.monarch.host_watch import HostWatch
from torchtitan_rl.backends.monarch.hosts import Host, Hosts, _Wanted
from torchtitan_rl.errors import ConfigError, HostsBusyError


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


def test_a_host_answers_after_two_beats_and_does_not_once_it_is_lost() -> None:
    async def play(num_beats: int) -> bool:
        agent = cast(Any, "there")
        host = Host(index=0, name="there", ip="127.0.0.77", mesh=cast(Any, None), agent=agent)
        hosts = Hosts([host], wanted=_Wanted(checkpoint="", here=describe_host("local", "")))
        watch = HostWatch(
            hosts, log_dir=Path(), trace_dir=None, say=print, on_lost=lambda index, cause: None
        )
        asking = asyncio.create_task(watch.answers(0))
        for _ in range(num_beats):
            await asyncio.sleep(1.0)
            assert not asking.done()
            watch._note_answer(0)
        await asyncio.sleep(1.0)
        if not asking.done():
            watch._note_loss(host)
        assert watch.is_lost(0) is not await asking
        return await asking

    assert run_virtually(play(2))
    assert not run_virtually(play(1))


def test_a_lost_host_is_not_attached_at_once_where_it_was_lost() -> None:
    with socket.create_server(("127.0.0.77", 0)) as server:
        address = f"tcp://127.0.0.77:{server.getsockname()[1]}"
        mesh = cast(Any, None)
        lost = Host(index=0, name=address, ip="127.0.0.77", mesh=mesh, address=address)
        hosts = Hosts([lost], wanted=_Wanted(checkpoint="", here=describe_host("local", "")))
        hosts.lose(lost)
        assert lost.lost.is_set()
        assert asyncio.run(hosts.attach_again(0)) is None
