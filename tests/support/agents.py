"""Agents without HTTP: they ask `Sessions` directly, as the endpoint's bridge would for them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from tests.support.rollouts import PROBLEM
from torchtitan_rl.agents.agent import AgentCall
from torchtitan_rl.agents.env import AgentEnv, AgentHost
from torchtitan_rl.serving.sessions import Sessions
from torchtitan_rl.token_sets import kept_runs
from torchtitan_rl.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    KeptTokens,
    OnProgress,
    Problem,
    Progress,
    SamplingParams,
    VersionRun,
)

_ids = itertools.count()


def asked(
    prompt: Sequence[int], session_id: str | None = None, *, max_tokens: int = 100, **sampling
) -> GenerationRequest:
    """A request as a client would make it: with an id and sampling of its own."""
    return GenerationRequest(
        request_id=f"chatcmpl-{next(_ids)}",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        session_id=session_id,
    )


@dataclass
class TokenRouter:
    """Samples token after token, one each ``token_s``, until its budget or an abort."""

    token_s: float = 1.0
    failure: Exception | None = None
    aborted: set[str] = field(default_factory=set)
    num_sampled: int = 0
    kept_tokens: tuple[KeptTokens, ...] = ()  # of each completion

    async def generate(
        self, request: GenerationRequest, on_progress: OnProgress | None = None
    ) -> Completion:
        tokens: list[int] = []
        while len(tokens) < request.sampling.max_tokens:
            await asyncio.sleep(self.token_s)
            if self.failure is not None:
                raise self.failure
            if request.request_id in self.aborted:
                return self._completion(request, tokens, FinishReason.ABORT)
            tokens.append(1 + self.num_sampled % 97)
            self.num_sampled += 1
            if on_progress is not None:
                on_progress(
                    Progress(
                        request_id=request.request_id,
                        start=len(tokens) - 1,
                        token_ids=(tokens[-1],),
                        logprobs=(-1 / tokens[-1],),
                        version_runs=(VersionRun(0, 3),),
                    )
                )
        return self._completion(request, tokens, FinishReason.LENGTH)

    async def abort(self, request_ids: Collection[str]) -> None:
        self.aborted.update(request_ids)

    def _completion(self, request, tokens, reason) -> Completion:
        return Completion(
            request_id=request.request_id,
            token_ids=tuple(tokens),
            logprobs=tuple(-1 / token for token in tokens),
            version_runs=(VersionRun(0, 3),) if tokens else (),
            finish_reason=reason,
            kept_tokens=kept_runs(self.kept_tokens[: len(tokens)]),
        )


class Hosted:
    """Makes environments of an agent; ``agent(ask, call)`` gets a function that completes."""

    def __init__(self, agent: Callable, **options) -> None:
        self.sessions = Sessions(TokenRouter(), timeout_s=1e6)
        self.agent = agent
        self.options = options
        self.envs: list[AgentEnv] = []
        self.calls: list[AgentCall] = []

    def __call__(self, problem: Problem) -> AgentEnv:
        host = AgentHost(base_url="http://here/v1", model="policy", sessions=self.sessions)
        agent = self._run if callable(self.agent) else self.agent
        env = AgentEnv(agent=agent, problem=problem, host=host, **self.options)
        self.envs.append(env)
        return env

    def bound(self) -> AgentEnv:
        return self(PROBLEM)

    async def _run(self, call: AgentCall):
        self.calls.append(call)

        async def ask(prompt: Sequence[int], **sampling) -> Completion:
            return await self.sessions.complete(asked(prompt, call.session_id, **sampling))

        return await self.agent(ask, call)


async def three_turns(ask, call) -> float:
    """A conversation that extends; its reward follows from what was sampled."""
    prompt: tuple[int, ...] = (1, 2)
    for _ in range(3):
        completion = await ask(prompt, max_tokens=3)
        prompt = (*prompt, *completion.token_ids, 0)
    return float(sum(prompt))
