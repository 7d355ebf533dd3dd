"""The client of sessions and leases over real HTTP, and the curl examples of the documentation."""

from __future__ import annotations

import asyncio
import json
import math
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request

from tests.real.local_endpoint import local_endpoint
from tests.support.agents import TokenRouter, asked
from tests.support.async_tests import on_event_loop
from tests.support.resuming import SeededGenerate
from tests.support.rollouts import make_rollouter
from torchtitan_rl.agents.agent import RemoteAgent
from torchtitan_rl.agents.env import AgentEnv, AgentHost
from torchtitan_rl.agents.queue import ProblemQueue
from torchtitan_rl.client import AsyncClient, Client, EndpointError
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.serving.link import ControllerLink
from torchtitan_rl.serving.middleware import session_id
from torchtitan_rl.serving.sessions import Sessions
from torchtitan_rl.types import Problem, RolloutGroup

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
PROBLEM = Problem(problem_id="sum/1", data={"question": "1 + 1?"})


class Served:
    """An endpoint with sessions, a queue, and a completions route that samples token ids."""

    def __init__(self) -> None:
        self.sessions = Sessions(TokenRouter(token_s=0.0))
        self.queue = ProblemQueue()
        self.loop = asyncio.get_running_loop()
        self.url = ""

    def application(self, link: ControllerLink) -> EndpointApp:
        app = FastAPI()

        @app.post("/v1/completions")
        async def complete(request: Request) -> Any:
            body = await request.json()
            asking = asked(body["prompt"], session_id.get(), max_tokens=body["max_tokens"])
            work = asyncio.run_coroutine_threadsafe(self.sessions.complete(asking), self.loop)
            completion = await asyncio.wrap_future(work)
            return {"id": completion.request_id, "token_ids": completion.token_ids}

        return EndpointApp(app, EndpointConfig(), keys=Keys(api="secret"), commands=link)

    async def roll_out(self, size: int) -> RolloutGroup:
        host = AgentHost(
            base_url=self.url, model="policy", sessions=self.sessions, problems=self.queue
        )
        rollouter = make_rollouter(
            lambda problem: AgentEnv(agent=RemoteAgent(), problem=problem, host=host),
            generate=SeededGenerate(),
        )
        return await rollouter.run_group("g", PROBLEM, size=size, seed=7)


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    one = Served()
    handlers = {**one.sessions.handlers(), **one.queue.handlers()}
    async with local_endpoint(one.application, one.sessions.complete, handlers=handlers) as url:
        one.url = f"{url}/v1"
        yield one
    await one.sessions.aclose()


def ask(session: Any, *prompt: int) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {session.api_key}"}
    body = {"prompt": prompt, "max_tokens": 4}
    response = httpx.post(f"{session.base_url}/completions", json=body, headers=headers)
    response.raise_for_status()
    return response.json()


@on_event_loop
async def test_a_worker_leases_problems_and_their_rewards_end_the_rollouts() -> None:
    def solve(lease):
        assert (lease.problem_id, lease.data) == ("sum/1", PROBLEM.data)
        assert lease.model == "policy"
        assert lease.heartbeat()["lease_s"] == lease.lease_s
        rewards.append(len(ask(lease, 1, 2)["token_ids"]))
        if len(rewards) == 1:
            raise OSError("no disk")  # its problem is handed out again
        if len(rewards) == 2:
            lease.reward(0.5)
            return 0.25  # too late, which does not end the worker
        return float(rewards[-1])

    rewards: list[int] = []
    async with served() as endpoint:
        with Client(endpoint.url, api_key="secret") as client:
            rolling = asyncio.create_task(endpoint.roll_out(size=2))
            number = await asyncio.to_thread(client.work, solve, keeps_on=lambda: len(rewards) < 3)
            group = await rolling
    assert number == 3
    assert sorted(r.reward for r in group.rollouts) == sorted([0.5, rewards[-1]])
    assert sorted(r.metrics["agent/restarts"] for r in group.rollouts) == [0, 1]


BAD_REWARDS = (math.nan, math.inf, 1e40, 10**400, "1.0", [1.0], np.zeros(2), 1j)
GOOD_REWARDS = (np.float32(0.5), np.int64(1), True)


def returned(posted: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """What became of each problem: its reward, or how it was returned."""
    return [body.get("reward", body.get("outcome")) for path, body in posted if "lease" not in path]


def endpoint_of_one_worker(posted: list[tuple[str, dict[str, Any]]]) -> httpx.MockTransport:
    lease = {"session_id": "s", "model": "m", "problem_id": "p", "data": {}, "lease_s": 60.0}

    def answer(request: httpx.Request) -> httpx.Response:
        posted.append((request.url.path, json.loads(request.content)))
        return httpx.Response(200, json=lease)

    return httpx.MockTransport(answer)


def test_a_reward_that_is_no_finite_number_gives_its_problem_back_and_the_worker_goes_on() -> None:
    posted: list[tuple[str, dict[str, Any]]] = []
    rewards: list[Any] = [*BAD_REWARDS, *GOOD_REWARDS]
    http = httpx.Client(transport=endpoint_of_one_worker(posted))
    client = Client("http://here/v1", http=http)
    number = client.work(lambda lease: rewards.pop(0), keeps_on=lambda: bool(rewards))
    assert number == len(BAD_REWARDS) + len(GOOD_REWARDS)
    assert returned(posted) == ["failed"] * len(BAD_REWARDS) + [0.5, 1.0, 1.0]
    assert "the reward nan is no finite number" in posted[1][1]["cause"]
    with pytest.raises(ValueError, match="the reward nan"):
        client.session("s").reward(math.nan)


@on_event_loop
async def test_the_async_client_does_the_same_and_rewards_may_come_later() -> None:
    async def solve(lease):
        sessions.append(lease.session_id)
        await lease.heartbeat()
        await asyncio.to_thread(ask, lease, 1)
        return

    sessions: list[str] = []
    async with served() as endpoint, AsyncClient(endpoint.url, api_key="secret") as client:
        rolling = asyncio.create_task(endpoint.roll_out(size=1))
        assert await client.work(solve, keeps_on=lambda: not sessions) == 1
        assert await client.lease(wait_s=0) is None
        await client.session(sessions[0]).reward(0.75)
        (rollout,) = (await rolling).rollouts
        with pytest.raises(EndpointError) as caught:
            await client.session(sessions[0]).reward(0.75)
    assert rollout.reward == 0.75
    assert (caught.value.status, caught.value.code) == (400, "session_closed")


@on_event_loop
async def test_a_session_by_hand_gives_its_branches_rewards_and_returns_its_episodes() -> None:
    def by_hand(client: Client) -> list[dict[str, Any]]:
        session = client.open_session("game-1")
        first, _ = ask(session, 1), ask(session, 2)
        assert session.read()["turns"] == 2
        session.reward(-1.0, response_id=first["id"])
        with pytest.raises(EndpointError, match="response_not_found"):
            session.reward(-1.0, response_id="another")
        closed = session.reward(1.0, return_episodes=True)
        assert closed["reward"] == 1.0
        return closed["episodes"]

    async with served() as endpoint:
        episodes = await asyncio.to_thread(by_hand, Client(endpoint.url, api_key="secret"))
    assert [episode["reward"] for episode in episodes] == [-1.0, 1.0]


@on_event_loop
async def test_the_curl_examples_of_the_documentation_are_a_whole_rollout() -> None:
    (script,) = re.findall(r"```bash\n(URL=.*?)```", PAGE.read_text(), re.DOTALL)
    async with served() as endpoint:
        rolling = asyncio.create_task(endpoint.roll_out(size=1))
        shell = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-euo", "pipefail", "-c", script.replace(*address_of(endpoint))],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert shell.returncode == 0, shell.stderr
        (rollout,) = (await rolling).rollouts
    assert (rollout.reward, rollout.turns[0].prompt_token_ids) == (1.0, (5, 6))


def address_of(endpoint: Served) -> tuple[str, str]:
    return "http://127.0.0.1:8000/v1", endpoint.url


def test_a_request_without_an_answer_is_sent_again_and_counts_once() -> None:
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) == 1:
            raise httpx.ReadError("cut")
        if len(keys) == 2:
            return httpx.Response(503, json={})
        return httpx.Response(200, json={"session_id": "s"})

    http = httpx.Client(transport=httpx.MockTransport(answer))
    session = Client("http://here/v1", http=http).open_session()
    assert (session.session_id, session.api_key) == ("s", "agent:s")
    assert len(keys) == 3
    assert len(set(keys)) == 1


class EndedRun:
    """Leases one problem; then nothing answers, or all is refused. Where ``loses_reward`` it ends
    before the reward has come."""

    def __init__(self, refusal: int | None = None, *, loses_reward: bool = False) -> None:
        self._refusal, self._loses_reward = refusal, loses_reward
        self._has_leased = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if not self._has_leased:
            self._has_leased = True
            lease = {"session_id": "s", "model": "policy", "problem_id": "p", "data": {}}
            return httpx.Response(200, json={**lease, "lease_s": 60.0})
        if request.url.path.endswith("/reward") and not self._loses_reward:
            return httpx.Response(200, json={})
        if self._refusal is None:
            raise httpx.ConnectError("refused")
        return httpx.Response(self._refusal, json={"error": {"code": "some_code"}})

    def work(self) -> int:
        http = httpx.Client(transport=httpx.MockTransport(self))
        return Client("http://here/v1", http=http, patience_s=0).work(lambda _: 1.0)

    def work_async(self) -> int:
        async def solve(_: Any) -> float:
            return 1.0

        http = httpx.AsyncClient(transport=httpx.MockTransport(self))
        client = AsyncClient("http://here/v1", http=http, patience_s=0)
        return asyncio.run(client.work(solve))


@pytest.mark.parametrize("refusal", [None, 503])
@pytest.mark.parametrize("work", [EndedRun.work, EndedRun.work_async])
def test_a_worker_ends_with_the_endpoint_that_it_had_problems_of(work, refusal) -> None:
    assert work(EndedRun(refusal)) == 1


@pytest.mark.parametrize("work", [EndedRun.work, EndedRun.work_async])
def test_a_worker_whose_last_reward_came_too_late_ends_too(work) -> None:
    assert work(EndedRun(loses_reward=True)) == 1


@pytest.mark.parametrize("work", [EndedRun.work, EndedRun.work_async])
def test_a_worker_without_an_endpoint_or_the_right_key_fails(work) -> None:
    with pytest.raises(EndpointError, match="401 some_code"):
        work(EndedRun(401))
    nothing = EndedRun()
    nothing._has_leased = True
    with pytest.raises(httpx.ConnectError):
        work(nothing)
