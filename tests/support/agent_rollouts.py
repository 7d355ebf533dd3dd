"""Agents through the real rollouter, on a virtual clock."""

from __future__ import annotations

import asyncio

from tests.support.agents import Hosted
from tests.support.resuming import SeededGenerate
from tests.support.rollouts import PROBLEM, make_rollouter
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.serving.errors import RefusedError


class SlowGenerate(SeededGenerate):
    """Takes a second for each request."""

    async def __call__(self, request, /):
        await asyncio.sleep(1)
        return await super().__call__(request)


def roll_out(hosted: Hosted, *, generate=None, size=1, **options):
    options = {"max_turns": 5, "max_tokens_per_turn": 3, **options}
    rollouter = make_rollouter(hosted, generate=generate or SeededGenerate(), **options)
    group = run_virtually(rollouter.run_group("g", PROBLEM, size=size, seed=7))
    return group.rollouts


def only(agent, **options):
    names = ("grace_s", "reward_at_limit", "replays", "max_restarts")
    hosting = {k: options.pop(k) for k in names if k in options}
    hosted = Hosted(agent, **hosting)
    (rollout,) = roll_out(hosted, **options)
    assert hosted.sessions.counts()["sessions_open"] == 0
    return rollout, hosted


def refusal(error: RefusedError) -> tuple[int, str]:
    return error.status, error.code


CLOSED = (400, "session_closed")
