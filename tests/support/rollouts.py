"""Small real pieces for rollout tests: a generator with a script, environments of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchtitan_rl.rollout.config import RolloutConfig, SamplingConfig
from torchtitan_rl.rollout.env import Observation, Terminal
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Problem,
    RolloutStatus,
    VersionRun,
)

PROBLEM = Problem(problem_id="p", data={})
SCRIPT = [(11, 12), (13,), (14, 15), (16,), (17,)]


def complete(
    request: GenerationRequest,
    token_ids: Sequence[int],
    finish_reason: FinishReason = FinishReason.STOP,
) -> Completion:
    return Completion(
        request_id=request.request_id,
        token_ids=tuple(token_ids),
        logprobs=tuple(-0.5 - i for i in range(len(token_ids))),
        version_runs=(VersionRun(0, 3),),
        finish_reason=finish_reason,
    )


@dataclass
class ScriptedGenerate:
    """Answers the n-th turn of any rollout with the n-th script entry; records its requests.

    An entry is token ids (cut at the budget), an exception to raise, or a function of the request.
    """

    script: Sequence[object]
    requests: list[GenerationRequest] = field(default_factory=list)

    async def __call__(self, request: GenerationRequest, /) -> Completion:
        self.requests.append(request)
        entry = self.script[int(request.request_id.rsplit("/t", 1)[1])]
        await asyncio.sleep(0)
        if isinstance(entry, BaseException):
            raise entry
        if callable(entry):
            entry = entry(request)
        if asyncio.iscoroutine(entry):
            entry = await entry
        if isinstance(entry, Completion):
            return entry
        cut = len(entry) > request.sampling.max_tokens
        reason = FinishReason.LENGTH if cut else FinishReason.STOP
        return complete(request, entry[: request.sampling.max_tokens], reason)


class CountingEnv:
    """Appends each completion and a separator (token 0) to the prompt; ends after ``turns``."""

    def __init__(self, turns: int = 2, reward: float | None = 1.0) -> None:
        self.turns = turns
        self.reward = reward
        self.calls: list[str] = []
        self.prompt: tuple[int, ...] = (1, 2)

    async def reset(self) -> Observation:
        self.calls.append("reset")
        return Observation(prompt_token_ids=self.prompt)

    async def step(self, completion: Completion) -> Observation | Terminal:
        self.calls.append("step")
        if self.calls.count("step") == self.turns:
            return Terminal(reward=self.reward, turn_reward=0.5, metrics={"steps": self.turns})
        self.prompt = (*self.prompt, *completion.token_ids, 0)
        return Observation(prompt_token_ids=self.prompt, turn_reward=0.25, turn_text="turn")

    async def finish(self, status: RolloutStatus) -> Terminal:
        self.calls.append(f"finish {status}")
        return Terminal(reward=0.125)

    async def close(self) -> None:
        self.calls.append("close")


class BlockingEnv:
    """Its methods are plain; ends after one turn."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def reset(self) -> Observation:
        self.calls.append("reset")
        return Observation(prompt_token_ids=(1, 2))

    def step(self, completion: Completion) -> Observation | Terminal:
        self.calls.append("step")
        return Terminal(reward=1.0)

    def finish(self, status: RolloutStatus) -> Terminal:
        return Terminal(reward=0.125)

    def close(self) -> None:
        self.calls.append("close")


class Factory:
    """Makes the i-th environment with the i-th function, and keeps them."""

    def __init__(self, *makers: Callable[[], object]) -> None:
        self.makers = list(makers)
        self.made: list[object] = []

    def __call__(self, problem: Problem) -> object:
        env = self.makers[len(self.made) % len(self.makers)]()
        self.made.append(env)
        return env


def config(**changes: object) -> RolloutConfig:
    sampling = SamplingConfig(
        max_tokens_per_turn=changes.pop("max_tokens_per_turn", 8), temperature=0.7
    )
    return RolloutConfig(sampling=sampling, **changes)


def make_rollouter(factory, *, generate=None, rubric=None, active_time=None, **limits) -> Rollouter:
    return Rollouter(
        generate=generate or ScriptedGenerate(SCRIPT),
        environment=factory,
        config=config(**limits),
        rubric=rubric,
        active_time=active_time,
    )


def run_rollouts(factory, *, size=1, on_rollout=None, **options):
    """The rollouts of one group; ``options`` are those of `make_rollouter`."""
    rollouter = make_rollouter(factory, **options)
    group = rollouter.run_group("g", PROBLEM, size=size, seed=7, on_rollout=on_rollout)
    result = asyncio.run(group)
    assert rollouter.activities() == []
    return result.rollouts


def only(*args, **kwargs):
    (rollout,) = run_rollouts(*args, **kwargs)
    return rollout


def closes(factory) -> list[int]:
    return [env.calls.count("close") for env in factory.made]


class Hanging(CountingEnv):
    async def step(self, completion):
        self.calls.append("step")
        await asyncio.Event().wait()


def raising(method: str, error: BaseException):
    class Broken(CountingEnv):
        pass

    async def fail(self, *args):
        raise error

    setattr(Broken, method, fail)
    return lambda: Broken(turns=9)
