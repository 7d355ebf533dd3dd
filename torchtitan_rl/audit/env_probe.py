"""Watches an environment from outside: what each call answered, how long it took, and for how long
it blocked the event loop."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from torchtitan_rl.rollout.env import (
    Observation,
    Terminal,
    is_stateful,
    replays,
    require_async,
)
from torchtitan_rl.rollout.run import EnvironmentFactory
from torchtitan_rl.rollout.tree import RolloutEnv, is_tree_env
from torchtitan_rl.types import Completion, Problem, RolloutStatus

_T = TypeVar("_T")
_SCHEDULING = Path("/proc/thread-self/schedstat")  # ns on a core, ns waiting for one, turns


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvCall:
    """``blocked_s`` is the longest time in which nothing else on the event loop could run."""

    method: str
    seconds: float
    blocked_s: float


@dataclass(slots=True, kw_only=True)
class Watched:
    """All calls of one environment; ``answers[n]`` and ``states[n]``, as JSON, are those after n
    turns."""

    problem: Problem
    calls: list[EnvCall] = field(default_factory=list)
    answers: list[Observation | Terminal] = field(default_factory=list)
    states: list[str | None] = field(default_factory=list)
    is_stateful: bool = False
    replays: bool = False

    def seconds(self, method: str) -> list[float]:
        return [call.seconds for call in self.calls if call.method == method]


def watching(environment: EnvironmentFactory, found: list[Watched]) -> EnvironmentFactory:
    """Makes environments that are watched, and adds what is seen of each to ``found``; agents' are
    left as they are."""

    def make(problem: Problem) -> RolloutEnv:
        watched = Watched(problem=problem)
        found.append(watched)
        start_s, own_start_s = time.perf_counter(), _own_time_s()
        env = environment(problem)
        took_s, blocked_s = time.perf_counter() - start_s, _own_time_s() - own_start_s
        require_async(env)
        if is_tree_env(env):
            found.remove(watched)
            return env
        watched.calls.append(EnvCall(method="creation", seconds=took_s, blocked_s=blocked_s))
        return _WatchedEnv(env, watched)

    return make


class _WatchedEnv:
    """Has the protocols of the environment that it wraps."""

    def __init__(self, env: Any, watched: Watched) -> None:  # a TokenEnv
        self.wrapped_env = env
        self._watched = watched
        watched.is_stateful, watched.replays = is_stateful(env), replays(env)

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        return getattr(self.wrapped_env, "messages", ())

    async def reset(self) -> Observation:
        answer: Observation = await self._timed("reset", self.wrapped_env.reset())
        self._watched.answers.append(answer)
        return answer

    async def step(self, completion: Completion) -> Observation | Terminal:
        answer: Observation | Terminal = await self._timed(
            "step", self.wrapped_env.step(completion)
        )
        self._watched.answers.append(answer)
        return answer

    async def finish(self, status: RolloutStatus) -> Terminal:
        return await self._timed("finish", self.wrapped_env.finish(status))

    async def close(self) -> None:
        await self._timed("close", self.wrapped_env.close())

    async def state_dict(self) -> Any:
        state = await self._timed("state_dict", self.wrapped_env.state_dict())
        self._watched.states.append(None if state is None else json.dumps(state))
        return state

    async def load_state_dict(self, state: Any) -> None:
        await self._timed("load_state_dict", self.wrapped_env.load_state_dict(state))

    async def _timed(self, method: str, work: Coroutine[Any, Any, _T]) -> _T:
        watch = _Stopwatch(work)
        start_s = time.perf_counter()
        try:
            return await watch
        finally:
            took_s = time.perf_counter() - start_s
            self._watched.calls.append(
                EnvCall(method=method, seconds=took_s, blocked_s=watch.longest_s)
            )


def _own_time_s() -> float:
    """A clock that stands still while this thread could run and others have its core, so that it
    shows the same on a busy machine; all the time where the kernel does not count that."""
    try:
        _, waited_ns, _ = _SCHEDULING.read_text().split()
    except (OSError, ValueError):
        waited_ns = "0"
    return time.perf_counter() - int(waited_ns) / 1e9


class _Stopwatch(Awaitable[_T], Generic[_T]):
    """Awaits a coroutine and measures its longest stretch between two waits."""

    def __init__(self, work: Coroutine[Any, Any, _T]) -> None:
        self._work = work
        self.longest_s = 0.0

    def __await__(self) -> Generator[Any, Any, _T]:
        go_on: Callable[[Any], Any] = self._work.send
        value: Any = None
        while True:
            start_s = _own_time_s()
            try:
                waits_for = go_on(value)
            except StopIteration as end:
                result: _T = end.value
                return result
            finally:
                self.longest_s = max(self.longest_s, _own_time_s() - start_s)
            try:
                go_on, value = self._work.send, (yield waits_for)
            except BaseException as error:  # a cancellation, too, is the coroutine's to handle
                go_on, value = self._work.throw, error
