"""Tasks whose rollouts are agents: a subclass of `AgentTask` defines the dataset and an agent for
each problem (and a rubric, if the agent's own reward is not the whole one). The run must enable its
endpoint, which serves the agents.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan_rl.agents.agent import Agent, RemoteAgent
from torchtitan_rl.agents.env import AgentEnv, AgentHost
from torchtitan_rl.bounds import Count, Positive, PositiveFloat
from torchtitan_rl.rollout.env import TokenEnv
from torchtitan_rl.rollout.task import Task
from torchtitan_rl.rollout.tree import RolloutEnv
from torchtitan_rl.types import Problem

if TYPE_CHECKING:
    from torchtitan_rl.rollout.config import RolloutConfig
    from torchtitan_rl.rollout.run import EnvironmentFactory
    from torchtitan_rl.serving.config import EndpointConfig


@dataclass(frozen=True, kw_only=True)
class AgentTask(Task):
    """A task with an agent for each rollout, which may take ``rollout.step_timeout_s`` between two
    requests."""

    grace_s: PositiveFloat = 5.0
    """Seconds in which an agent must return a reward after it reached a limit, and in which it must
    end after it was cancelled."""
    reward_at_limit: float | None = 0.0
    """Reward of an agent that returns no reward within ``grace_s`` after a limit. ``None``: its
    rollout fails."""
    replayable: bool = False
    """Whether the agents send the same requests again when they get the same answers. If so, an
    agent that fails, or whose run was killed, is started again, and its repeated requests are
    answered from the recorded turns; a different request begins a new branch."""
    max_restarts: Count = 2
    """How often the agent of a rollout is started again after it failed, if it is replayable."""

    def agent(self, problem: Problem) -> Agent:
        """The agent for one rollout: a function of an `AgentCall`, or an `AgentCommand`. Called on
        the controller's event loop: do slow work in the agent, not here."""
        raise NotImplementedError(f"{type(self).__name__} does not override `agent`")

    async def prepare(self, problem: Problem) -> None:
        """Prepare a run of the agent, outside of its time, for example start a server. Called
        before each run, on the controller's event loop."""

    def agent_environment(
        self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig, host: AgentHost
    ) -> RolloutEnv:
        return AgentEnv(
            agent=self.agent(problem),
            problem=problem,
            host=host,
            grace_s=min(self.grace_s, limits.step_timeout_s / 2),
            reward_at_limit=self.reward_at_limit,
            decode=tokenizer.decode,
            replays=self.replayable,
            max_restarts=self.max_restarts,
            prepare=partial(self.prepare, problem),
        )

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        raise RuntimeError("an agent's environment needs the endpoint: see environment_factory")


@dataclass(frozen=True, kw_only=True)
class RemoteAgentTask(AgentTask):
    """A task whose agents run elsewhere: workers lease its problems from the endpoint. Only
    `dataset` has to be overridden. `docs/agents.md` has an example of a worker."""

    lease_s: PositiveFloat = 60.0
    """Seconds without a request or a heartbeat after which a worker counts as lost."""
    max_leases: Positive = 3
    """How often a rollout's problem is handed out; then the rollout fails."""
    reward_timeout_s: PositiveFloat | None = None
    """Seconds that a reward may take after a worker has returned its lease as done. None is
    ``rollout.step_timeout_s``."""

    def agent(self, problem: Problem) -> RemoteAgent:
        return RemoteAgent(
            lease_s=self.lease_s,
            max_leases=self.max_leases,
            reward_timeout_s=self.reward_timeout_s,
        )


def environment_factory(
    task: Task, *, tokenizer: Any, limits: RolloutConfig, host: AgentHost | None
) -> EnvironmentFactory:
    """The function that makes a task's environments. ValueError: its rollouts are agents, and
    ``host`` is None."""
    if not isinstance(task, AgentTask):
        return partial(task.environment, tokenizer=tokenizer, limits=limits)
    if host is None:
        raise ValueError(f"{type(task).__name__} needs the endpoint")
    return partial(task.agent_environment, tokenizer=tokenizer, limits=limits, host=host)


def agent_notes(task: Task, endpoint: EndpointConfig) -> list[str]:
    """Notes for the user before agents run, one line each."""
    if not isinstance(task, AgentTask) or endpoint.tool_call_parser:
        return []
    return [
        f"warning: endpoint.tool_call_parser is not set: requests of {type(task).__name__}'s "
        "agents that have tools are refused or answered without calls; where they have tools, give "
        "--endpoint.tool-call-parser and the parser of the policy's calls, such as hermes"
    ]


def agent_errors(task: Task, endpoint: EndpointConfig, *, num_rollouts: int = 0) -> list[str]:
    """The reasons why the endpoint cannot serve a task's agents, one message each."""
    if not isinstance(task, AgentTask):
        return []
    errors = []
    if not endpoint.enabled:
        errors.append(
            f"endpoint.enabled is False: the rollouts of {type(task).__name__} are agents, which "
            "get completions from the endpoint; give --endpoint.enabled"
        )
    if num_rollouts > (most := endpoint.max_concurrent_requests):
        errors.append(
            f"endpoint.max_concurrent_requests is {most}: up to {num_rollouts} agents ask at once; "
            f"give at least {num_rollouts}"
        )
    return errors
