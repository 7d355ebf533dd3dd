"""Cases of runs whose agents ask an endpoint, whose process dies: what they run, and where it dies.

The endpoint's process is on the run's own loop, so it dies at awaits of its own, of its clients and
of the controller.
"""

from __future__ import annotations

import asyncio
import random
import re
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tests.campaign.faults import at_an_await, draw_faults
from tests.campaign.machine import Fault, Machine
from tests.campaign.plan import CampaignPlan, draw
from tests.support.endpoint_processes import Processes
from tests.support.simulated_faults import Fate
from tests.support.simulated_parts import VOCAB
from tests.support.simulation import Simulation
from torchtitan_rl.agents.agent import AgentCall
from torchtitan_rl.agents.env import AgentEnv, AgentHost
from torchtitan_rl.aio import first_of
from torchtitan_rl.orchestration.records import Recorder
from torchtitan_rl.rollout.rubric import Rubric
from torchtitan_rl.serving.restarts import EndpointRestarts
from torchtitan_rl.serving.service import EndpointService
from torchtitan_rl.serving.sessions import Sessions
from torchtitan_rl.types import Problem

_OF_REQUESTS = re.compile(r"(app|bridge|env|link|middleware|requests|retries|sessions|tree)\.py:")


@dataclass(frozen=True, kw_only=True)
class AgentsPlan(CampaignPlan):
    endpoint_restarts: int
    endpoint_start_s: float

    def make(self, root: Path, rubric: Rubric | None, fate: Fate, recorder: Recorder) -> Simulation:
        return AgentSimulation(self, root, rubric=rubric, fate=fate, recorder=recorder)


def draw_agents(seed: int) -> AgentsPlan:
    rng = random.Random(f"agents {seed}")
    plan = draw(seed)
    own = {
        "env_kind": "agent",
        "spare_turns": 3,  # so that requests that are run twice show
        "request_timeout_s": 600.0,  # a retry after a time-out begins elsewhere
        "rollout_timeout_s": 400.0,
        "env_timeout_s": 100.0,
        "endpoint_restarts": rng.choice([0, 1, 3, 3, 3]),
        "endpoint_start_s": rng.choice([0.5, 3.0, 20.0]),
    }
    return AgentsPlan(**{field.name: getattr(plan, field.name) for field in fields(plan)} | own)


def draw_losses_of_endpoint(seed: int, life: int, dry: Machine) -> list[Fault]:
    """The endpoint's process dies up to three times, mostly while requests run; in half of the
    lives something else fails, too."""
    rng = random.Random(f"endpoint {seed} {life}")
    places = sorted(place for place in dry.counts["await"] if _OF_REQUESTS.match(place))
    losses = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        if rng.random() < 0.3 or not places:
            losses.append(at_an_await(rng, dry, "lose_endpoint"))
            continue
        place = rng.choice(places)
        nth = rng.randrange(dry.counts["await"][place])
        losses.append(Fault(zone="await", point=place, nth=nth, action="lose_endpoint"))
    return losses if rng.random() < 0.5 else [*draw_faults(seed, life, dry), *losses]


class AgentSimulation(Simulation):
    """A run whose rollouts are those of agents. Its machine can end the endpoint's process."""

    plan: AgentsPlan

    def __init__(self, plan: AgentsPlan, root: Path, **options: Any) -> None:
        super().__init__(plan, root, **options)
        self.sessions = Sessions(self.router)
        self.endpoint = Processes(start_s=plan.endpoint_start_s)
        restarts = EndpointRestarts(
            max_restarts=plan.endpoint_restarts,
            say=self.said.append,
            on_failure=self.failures.append,
        )
        self.service = EndpointService(
            self.endpoint, self.router, self.sessions, interval_s=0.05, restarts=restarts
        )
        if isinstance(self.fate, Machine):
            self.fate.controls["lose_endpoint"] = self.endpoint.die

    def alongside(self) -> tuple[Any, ...]:
        return (*super().alongside(), self._serving())

    async def train(self, **options: Any) -> None:
        """As `RunEndpoint.background` does it."""
        await first_of(super().train(**options), self.service.run_until_lost())

    def environment(self, problem: Problem) -> AgentEnv:
        return AgentEnv(
            agent=self._agent,
            problem=problem,
            host=AgentHost(base_url="", model="m", sessions=self.sessions),
            replays=True,
        )

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        try:
            async with self.service:
                yield
        finally:
            await self.endpoint.close()
            await self.sessions.aclose()

    async def _agent(self, call: AgentCall) -> float:
        """Ask for the first turn, then for all others at once."""
        prompt = [1, call.problem.data["seed"] % VOCAB]
        first = await self._ask(call, prompt)
        others = [[*prompt, *first, number] for number in range(self.plan.turns - 1)]
        answers = await asyncio.gather(*(self._ask(call, other) for other in others))
        tokens = [token for answer in (first, *answers) for token in answer]
        return float(zlib.crc32(bytes(tokens)) % self.plan.reward_levels)

    async def _ask(self, call: AgentCall, prompt: list[int]) -> list[int]:
        await asyncio.sleep(self.chance.uniform(0.0, self.plan.env_delay_s))
        headers = {"Authorization": f"Bearer {call.api_key}"}
        body = {"prompt": prompt}
        path = "/v1/chat/completions"
        status, answer = await self.endpoint.ask(
            path, "POST", body, headers=headers, num_attempts=5
        )
        if status != 200:
            raise RuntimeError(f"{status}: {answer!r}")
        tokens: list[int] = answer["token_ids"]
        return tokens
