"""Problems that workers elsewhere lease: hand-outs, lost workers, late rewards."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.agent_rollouts import CLOSED, SlowGenerate, refusal
from tests.support.agents import asked
from tests.support.rollouts import PROBLEM, make_rollouter
from tests.support.virtual_clock import run_virtually
from torchtitan_rl.agents.agent import RemoteAgent
from torchtitan_rl.agents.env import AgentEnv, AgentHost
from torchtitan_rl.agents.queue import ProblemQueue
from torchtitan_rl.aio import cancel_all
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.rollout.config import RolloutConfig
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.sessions import Sessions
from torchtitan_rl.types import Problem, RolloutGroup, RolloutStatus

LOST = (409, "lease_lost")


class Hosting:
    """A run whose agents are workers of the test."""

    def __init__(self, agent: RemoteAgent | None = None, **options) -> None:
        self.sessions = Sessions(None)
        self.queue = ProblemQueue()
        self.agent = agent or RemoteAgent()
        self.options = options
        self.generate = SlowGenerate()

    def __call__(self, problem: Problem) -> AgentEnv:
        host = AgentHost(
            base_url="http://here/v1",
            model="policy",
            sessions=self.sessions,
            problems=self.queue,
        )
        return AgentEnv(agent=self.agent, problem=problem, host=host, **self.options)

    def with_workers(self, *workers, size=1, **limits) -> tuple[Any, ...]:
        """The rollouts of a group, while workers run; a worker that raises fails the test."""
        options = {"max_turns": 5, "max_tokens_per_turn": 3, **limits}

        async def scenario():
            rollouter = make_rollouter(self, generate=self.generate, **options)
            working = [asyncio.create_task(worker(self)) for worker in workers]
            group = await rollouter.run_group("g", PROBLEM, size=size, seed=7)
            for task in working:
                if task.done():
                    task.result()
            await cancel_all(working)
            return group.rollouts

        return run_virtually(scenario())

    async def ask(self, lease, *prompt: int):
        return await self.sessions.complete(asked(prompt, lease["session_id"]))


async def refused(work) -> tuple[int, str]:
    with pytest.raises(RefusedError) as caught:
        await work
    return refusal(caught.value)


async def solves(run, reward=1.0):
    lease = await run.queue.lease(wait_s=10)
    await run.ask(lease, 1)
    await run.sessions.close(lease["session_id"], reward)
    return lease


def test_siblings_wait_in_the_queue_for_workers_which_end_them_with_rewards():
    run = Hosting()

    async def worker(run):
        for reward in (1.0, 0.0, 0.5):
            lease = await solves(run, reward)
            assert (lease["problem_id"], lease["model"]) == (PROBLEM.problem_id, "policy")
        assert await run.queue.lease() == {}

    rollouts = run.with_workers(worker, size=3)
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 0.5]
    assert run.queue.counts()["leases"] == 3
    assert run.sessions.counts()["sessions_rewarded"] == 3


@pytest.mark.parametrize(("replays", "ending"), [(False, "silence"), (True, "returned")])
def test_the_problem_of_a_lost_worker_is_handed_out_again(replays, ending):
    async def dies(run):
        lease = await run.queue.lease(wait_s=10)
        await run.ask(lease, 1)
        if ending == "returned":
            run.queue.return_(lease["session_id"], "failed", "no disk")
        second = await run.queue.lease(wait_s=1000)
        assert second["session_id"] != lease["session_id"]
        assert await refused(run.ask(lease, 1)) == CLOSED  # a worker that was only slow
        with pytest.raises(RefusedError) as caught:
            run.queue.heartbeat(lease["session_id"])
        assert refusal(caught.value) == LOST
        await run.ask(second, 1)
        await run.ask(second, 2)
        await run.sessions.close(second["session_id"], 1.0)

    run = Hosting(replays=replays)
    (rollout,) = run.with_workers(dies, step_timeout_s=500.0)
    assert (rollout.status, rollout.reward) == (RolloutStatus.COMPLETED, 1.0)
    assert rollout.metrics["agent/restarts"] == 1
    seen = [(turn.prompt_token_ids, turn.is_seen) for turn in rollout.turns]
    anew = [] if replays else [((1,), False)]  # masked: the first worker's
    assert seen == [*anew, ((1,), True), ((2,), True)]


def test_a_problem_is_handed_out_so_often_and_then_its_rollout_fails_by_name():
    async def dies(run):
        while True:
            await run.queue.lease(worker="w7", wait_s=10)

    run = Hosting(RemoteAgent(lease_s=20.0, max_leases=2))
    (rollout,) = run.with_workers(dies)
    assert rollout.status is RolloutStatus.ENV_ERROR
    assert "worker 'w7' was silent for 20 s" in rollout.cause
    assert run.queue.counts()["leases_expired"] == 2


@pytest.mark.parametrize("moment", ["before", "as it is leased", "after"])
def test_a_worker_that_left_while_it_waited_costs_its_problem_no_time(moment):
    async def leaves(run):
        first = asyncio.create_task(run.queue.lease(worker="gone", wait_s=60))
        await asyncio.sleep(0)
        if moment == "before":
            first.cancel()
        while not run.queue.counts()["leases"] and not first.done():
            await asyncio.sleep(0)
        if moment == "after":
            run.queue.return_((await first)["session_id"], "unused", "")
        first.cancel()
        await asyncio.wait([first])
        began_s = asyncio.get_running_loop().time()
        await solves(run)
        assert asyncio.get_running_loop().time() == began_s + 1.0  # of its one request

    run = Hosting(RemoteAgent(lease_s=20.0, max_leases=1))
    (rollout,) = run.with_workers(leaves)
    assert (rollout.reward, rollout.metrics["agent/restarts"]) == (1.0, 0)
    counts = run.queue.counts()
    num_unused = 0 if moment == "before" else 1
    assert (counts["leases"], counts["leases_unused"]) == (1 + num_unused, num_unused)
    assert counts["leases_expired"] == 0


def test_heartbeats_requests_and_running_requests_keep_a_lease():
    async def worker(run):
        lease = await run.queue.lease(wait_s=10)
        for _ in range(3):
            await asyncio.sleep(15)
            run.queue.heartbeat(lease["session_id"])
        await asyncio.sleep(15)
        await run.ask(lease, 1)  # takes 50 s
        await asyncio.sleep(15)
        await run.sessions.close(lease["session_id"], 1.0)

    class VerySlow(SlowGenerate):
        async def __call__(self, request, /):
            await asyncio.sleep(50)
            return await super().__call__(request)

    run = Hosting(RemoteAgent(lease_s=20.0, max_leases=1))
    run.generate = VerySlow()
    (rollout,) = run.with_workers(worker, step_timeout_s=500.0)
    assert rollout.reward == 1.0, rollout.cause


def test_a_reward_may_come_long_after_the_lease_was_returned_but_not_for_ever():
    async def worker(run, delay_s=500.0):
        lease = await run.queue.lease(wait_s=10)
        await run.ask(lease, 1)
        run.queue.return_(lease["session_id"], "done", "")
        with pytest.raises(RefusedError):
            run.queue.return_(lease["session_id"], "failed", "")
        await asyncio.sleep(delay_s)
        await run.sessions.close(lease["session_id"], 0.5)

    async def late(run):
        with pytest.raises(RefusedError):
            await worker(run, 700.0)

    agent = RemoteAgent(reward_timeout_s=600.0)
    (rollout,) = Hosting(agent).with_workers(worker, step_timeout_s=60.0)
    assert rollout.reward == 0.5
    (rollout,) = Hosting(agent).with_workers(late, step_timeout_s=60.0)
    assert rollout.status is RolloutStatus.STEP_TIMEOUT
    assert "waited for its reward" in rollout.cause


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "beat", "sleep", "die", "fail", "done", "reward", "close", "old"]),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(scripts=st.lists(ACTIONS, min_size=1, max_size=3), replays=st.booleans())
def test_whatever_workers_do_every_rollout_ends_once_and_every_token_is_accounted_for(
    scripts, replays
):
    leases: list[Any] = []
    refusals: set[tuple[int, str]] = set()
    run = Hosting(RemoteAgent(lease_s=20.0, max_leases=3), replays=replays)

    async def act(run, lease, action, number) -> bool:
        """Whether the worker goes on with its problem."""
        session_id = lease["session_id"]
        if action == "ask":
            await run.ask(lease, 3, number % 2)
        elif action == "beat":
            run.queue.heartbeat(session_id)
        elif action == "sleep":
            await asyncio.sleep(4 * number)
        elif action == "old":
            await run.ask(leases[number % len(leases)], 5)
        elif action == "reward":
            await run.sessions.close(session_id, float(number))
        elif action == "close":
            await run.sessions.close(session_id)
        elif action in ("fail", "done"):
            run.queue.return_(session_id, {"fail": "failed", "done": "done"}[action], "")
        return action != "die"

    def worker_of(script):
        async def worker(run):
            while True:
                lease = await run.queue.lease(wait_s=30)
                if lease:
                    leases.append(lease)
                for action, number in script if lease else ():
                    try:
                        if not await act(run, lease, action, number):
                            break
                    except RefusedError as error:
                        refusals.add(refusal(error))

        return worker

    rollouts = run.with_workers(*map(worker_of, scripts), size=3)
    assert refusals <= {CLOSED, LOST}
    assert len({lease["session_id"] for lease in leases}) == len(leases)
    ids = [turn.completion.request_id for rollout in rollouts for turn in rollout.turns]
    assert sorted(ids) == sorted(request.request_id for request in run.generate.requests)
    group = RolloutGroup(group_id="g", problem=PROBLEM, rollouts=rollouts)
    counts = EpisodeBatcher(config=RolloutConfig(), row_len=512)([group]).tokens
    assert counts.generated == counts.trained + sum(counts.discarded.values())
    queue = run.queue.counts()
    assert queue["problems_waiting"] == queue["problems_leased"] == 0
    assert run.sessions.counts()["sessions_open"] == 0
