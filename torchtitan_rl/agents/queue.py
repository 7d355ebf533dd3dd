"""The problems that wait for remote workers, and the workers' leases.

A worker is any program that reaches the endpoint: a container, a remote machine, a service. It
leases a problem, which comes with a session, makes its requests in that session and posts its
reward there.

| event | effect |
|---|---|
| a request of the session, or a heartbeat | the lease lasts another ``lease_s`` |
| a reward, or the session is closed | the lease ends, and the rollout with it |
| the lease is returned as ``done`` | it ends; the reward may arrive within ``reward_timeout_s`` |
| the lease is returned as ``failed`` | the lease is lost |
| ``lease_s`` pass without a request or a heartbeat | the lease is lost |
| the worker left before it got the lease | the problem is the next one to be leased |

After a lost lease, the problem is handed out again in a new session (`AgentEnv`).

Invariants: a problem has one lease at a time. After a lease is lost, its session refuses all
requests. Every lease ends once, and each kind of ending is counted. A resumed run starts with an
empty queue, and its rollouts add their problems again.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchtitan_rl.agents.agent import AgentCall, AgentResult, RemoteAgent
from torchtitan_rl.aio import STOOD_STILL_S, loop_s
from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.rollout.records import problem_to_json
from torchtitan_rl.rollout.tree import TurnTree
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import CommandName, Handler, handler

MAX_WAITING_WORKERS = 4096


class LeaseLostError(TorchtitanRLError):
    """The worker that leased a problem failed, or was silent for too long."""


@dataclass(slots=True, eq=False)
class _Entry:
    agent: RemoteAgent
    call: AgentCall
    waits: TurnTree
    ended: asyncio.Future[AgentResult]
    worker: str = ""
    used_s: float = 0.0
    is_returned: bool = False  # returned as done, but the reward has not arrived
    timer: asyncio.TimerHandle | None = None

    def is_wanted(self, problem_id: str | None) -> bool:
        """Whether this is the problem with this id, if one is given."""
        return problem_id in (None, self.call.problem.problem_id)

    def lose(self, cause: str) -> None:
        if not self.ended.done():
            self.ended.set_exception(LeaseLostError(f"worker {self.worker!r} {cause}"))


class ProblemQueue:
    """The queue of one training run."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, _Entry] = OrderedDict()  # by session id, oldest first
        self._leased: dict[str, _Entry] = {}
        # By each waiting worker: the problem id that it wants (None: any).
        self._workers: dict[asyncio.Future[_Entry], str | None] = {}
        self._counts: Counter[str] = Counter(
            leases=0, leases_expired=0, leases_failed=0, leases_done=0, leases_unused=0
        )

    def counts(self) -> dict[str, float]:
        """Gauges and counters, by name."""
        waiting = {"problems_waiting": len(self._waiting), "problems_leased": len(self._leased)}
        return {**self._counts, **waiting}

    async def serve(self, agent: RemoteAgent, call: AgentCall, waits: TurnTree) -> AgentResult:
        """Have a worker solve the problem of ``call``; return once its session has been closed, or
        raise LeaseLostError."""
        entry = _Entry(agent, call, waits, asyncio.get_running_loop().create_future())
        self._waiting[call.session_id] = entry
        self._expect_worker(entry)
        try:
            self._hand_out(entry)
            return await entry.ended
        finally:
            self._waiting.pop(call.session_id, None)
            self._leased.pop(call.session_id, None)
            if entry.timer is not None:
                entry.timer.cancel()

    def end(self, session_id: str) -> None:
        """End the lease of a session, because the session was closed."""
        entry = self._leased.get(session_id)
        if entry is not None and not entry.ended.done():
            entry.ended.set_result(AgentResult())

    def record_use(self, session_id: str) -> None:
        """Extend the lease of a session, because a request of the session began or ended."""
        if session_id in self._leased:
            self._leased[session_id].used_s = loop_s()

    async def lease(
        self, *, problem_id: str | None = None, worker: str = "", wait_s: float = 0.0
    ) -> Mapping[str, Any]:
        """Lease the problem named ``problem_id``, or the one that has waited longest. Empty if none
        arrived within ``wait_s``. Raises RefusedError: too many workers wait."""
        wanted = (one for one in self._waiting.values() if one.is_wanted(problem_id))
        entry = next(wanted, None)
        if entry is not None:
            self._begin(entry)
        elif wait_s > 0:
            entry = await self._next(problem_id, wait_s)
        if entry is None:
            return {}
        entry.worker = worker
        return {
            "session_id": entry.call.session_id,
            "model": entry.call.model,
            "lease_s": entry.agent.lease_s,
            **problem_to_json(entry.call.problem),
        }

    def heartbeat(self, session_id: str) -> Mapping[str, Any]:
        """Extend a lease; RefusedError if there is none, or it has ended."""
        entry = self._require(session_id)
        entry.used_s = loop_s()
        return {"session_id": session_id, "lease_s": entry.agent.lease_s}

    def return_(
        self, session_id: str, outcome: Literal["done", "failed", "unused"], cause: str
    ) -> Mapping[str, Any]:
        """End a lease; raises as `heartbeat` does. ``unused``: no worker got the lease, so its
        problem waits again in this session."""
        entry = self._require(session_id)
        if outcome == "unused":
            self._give_back(entry)
        else:
            self._counts[f"leases_{outcome}"] += 1
        if outcome == "failed":
            entry.lose(f"returned it: {cause or 'it gave no cause'}")
        elif outcome == "done":
            entry.is_returned = True
            if entry.timer is not None:
                entry.timer.cancel()
            entry.waits.expect("its reward", entry.agent.reward_timeout_s)
        return {"session_id": session_id}

    def handlers(self) -> Mapping[CommandName, Handler]:
        """The handlers of workers' commands, whose arguments the routes have checked."""
        return {
            "problem.lease": handler(self.lease),
            "problem.heartbeat": handler(self.heartbeat),
            "problem.return": handler(self.return_),
        }

    def _require(self, session_id: str) -> _Entry:
        entry = self._leased.get(session_id)
        if entry is None or entry.ended.done() or entry.is_returned:
            name = repr(session_id)
            why = f"{name} is no lease, or it has ended: its problem may have another worker"
            raise RefusedError(409, "lease_lost", why)
        return entry

    async def _next(self, problem_id: str | None, wait_s: float) -> _Entry | None:
        if len(self._workers) >= MAX_WAITING_WORKERS:
            raise RefusedError(429, "too_many_workers", "too many workers wait: try again later")
        worker: asyncio.Future[_Entry] = asyncio.get_running_loop().create_future()
        self._workers[worker] = problem_id
        try:
            await asyncio.wait((worker,), timeout=wait_s)
        except asyncio.CancelledError:
            if worker.done():
                self._give_back(worker.result())
            raise
        finally:
            del self._workers[worker]
        return worker.result() if worker.done() else None

    def _hand_out(self, entry: _Entry) -> None:
        """Give a new problem to the worker that has waited longest and accepts this problem."""
        for worker, problem_id in self._workers.items():
            if not worker.done() and entry.is_wanted(problem_id):
                worker.set_result(entry)
                self._begin(entry)
                return

    def _give_back(self, entry: _Entry) -> None:
        """Make this problem the next one again, because no worker got its lease."""
        session_id = entry.call.session_id
        if entry.ended.done() or self._leased.pop(session_id, None) is None:
            return
        self._counts["leases_unused"] += 1
        if entry.timer is not None:
            entry.timer.cancel()
        self._waiting[session_id] = entry
        self._waiting.move_to_end(session_id, last=False)
        self._expect_worker(entry)
        self._hand_out(entry)

    def _expect_worker(self, entry: _Entry) -> None:
        entry.waits.expect("a worker that leases its problem", math.inf)

    def _begin(self, entry: _Entry) -> None:
        session_id = entry.call.session_id
        self._leased[session_id] = self._waiting.pop(session_id)
        self._counts["leases"] += 1
        entry.used_s = loop_s()
        entry.waits.start_time()
        entry.waits.expect("the next request of its worker")
        self._watch(entry, entry.agent.lease_s)

    def _watch(self, entry: _Entry, delay_s: float) -> None:
        due_s = loop_s() + delay_s
        loop = asyncio.get_running_loop()
        entry.timer = loop.call_at(due_s, self._check, entry, due_s)

    def _check(self, entry: _Entry, due_s: float) -> None:
        now_s = loop_s()
        if entry.waits.is_sampling or now_s - due_s > STOOD_STILL_S:
            # The worker was not silent: it waits for an answer, or this process was stopped.
            entry.used_s = now_s
        silent_s = now_s - entry.used_s
        if silent_s < entry.agent.lease_s:
            self._watch(entry, entry.agent.lease_s - silent_s)
        elif not entry.ended.done():
            self._counts["leases_expired"] += 1
            entry.lose(f"was silent for {entry.agent.lease_s:g} s")
