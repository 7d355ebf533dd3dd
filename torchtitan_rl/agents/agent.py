"""Agents: user code that calls the OpenAI API and returns a reward.

An agent is an async function, a synchronous function (which runs in its own thread, and may block),
a command, or a program elsewhere (`RemoteAgent`). It gets the endpoint's address and an API key
that names its session: the requests that the agent makes with this key become the turns of the
agent's rollout. The session ends when the agent returns, when the rollout reaches a limit, or when
a client closes the session. Later requests are refused (HTTP 400, code ``session_closed``).
`docs/agents.md` has examples.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.processes import run_command
from torchtitan_rl.rollout.calls import call
from torchtitan_rl.rollout.records import problem_to_json
from torchtitan_rl.serving.config import ADMIN_KEY, API_KEY
from torchtitan_rl.types import Problem

_SECRETS = (API_KEY, ADMIN_KEY)  # environment variables that commands do not inherit
_MAX_OUTPUT_BYTES = 16 << 20
_MAX_ENVIRONMENT_BYTES = 96 << 10  # for one variable; Linux refuses more than 128 KiB
_STDERR_CHARS = 400


class AgentError(TorchtitanRLError):
    """An agent failed. Only its own rollout fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """The argument of an agent. ``base_url`` ends in ``/v1``; ``api_key`` names the session."""

    base_url: str
    api_key: str = field(repr=False)
    model: str
    problem: Problem
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """The result of an agent, which may also return just its reward. If ``reward`` is None, the
    rubric or the client that closes the session gives it. ``part_rewards[PART]`` is the reward of
    the branches whose requests named the session ``SESSION.PART``."""

    reward: float | None = None
    part_rewards: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()  # the conversation, for the logged rollouts


AgentAnswer = float | AgentResult | None
AgentFunction = Callable[[AgentCall], AgentAnswer | Awaitable[AgentAnswer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """An agent that is a program.

    Its environment has ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``TORCHTITAN_RL_MODEL`` and
    ``TORCHTITAN_RL_SESSION_ID``. It gets its problem as JSON (``problem_id``, ``data``) on stdin; a
    short problem is also in ``TORCHTITAN_RL_PROBLEM``. The last line that it prints is the reward:
    a number, or ``{"reward": number, "metrics": {name: number}}``; any other line is no reward. An
    exit code other than 0 is a failure. At its end all processes that it started are killed.
    """

    argv: tuple[str, ...]
    cwd: str | Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # further variables
    timeout_s: float = 24 * 3600.0  # a rollout's own limits usually end it earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteAgent:
    """An agent that runs elsewhere: its problem waits in the run's queue until a worker leases it.

    A worker loses its lease after ``lease_s`` without a request or heartbeat. After ``max_leases``
    lost leases the rollout fails. After a lease was returned as done, the reward must arrive within
    ``reward_timeout_s`` (None: ``rollout.step_timeout_s``).
    """

    lease_s: float = 60.0
    max_leases: int = 3
    reward_timeout_s: float | None = None


Agent = AgentFunction | AgentCommand | RemoteAgent


async def run_agent(agent: AgentFunction | AgentCommand, agent_call: AgentCall) -> AgentResult:
    """Run an agent to its end. AgentError: it is a command, and failed; any exception: it is a
    function that raised it."""
    if isinstance(agent, AgentCommand):
        return await _run_command(agent, agent_call)
    answer = await call(agent, agent_call)
    return answer if isinstance(answer, AgentResult) else AgentResult(reward=answer)


async def _run_command(command: AgentCommand, agent_call: AgentCall) -> AgentResult:
    problem = json.dumps(problem_to_json(agent_call.problem))
    environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    environment |= {
        "OPENAI_BASE_URL": agent_call.base_url,
        "OPENAI_API_KEY": agent_call.api_key,
        "TORCHTITAN_RL_MODEL": agent_call.model,
        "TORCHTITAN_RL_SESSION_ID": agent_call.session_id,
        **command.environment,
    }
    if len(problem) <= _MAX_ENVIRONMENT_BYTES:
        environment["TORCHTITAN_RL_PROBLEM"] = problem
    result = await run_command(
        command.argv,
        timeout_s=command.timeout_s,
        cwd=command.cwd,
        env=environment,
        stdin=problem.encode(),
        max_output_bytes=_MAX_OUTPUT_BYTES,
    )
    program = command.argv[0]
    if result.exit_code != 0:
        if result.timed_out:
            how = f"timed out after {command.timeout_s} s"
        elif result.signal is not None:
            how = f"was killed by signal {result.signal}"
        else:
            how = f"ended with exit code {result.exit_code}"
        stderr = result.stderr.decode(errors="replace").strip()[-_STDERR_CHARS:]
        raise AgentError(f"{program} {how}: {stderr or 'it wrote nothing to stderr'}")
    if result.truncated:
        raise AgentError(f"{program} wrote more than {_MAX_OUTPUT_BYTES >> 20} MiB")
    return _last_line_result(result.stdout.decode(errors="replace"))


def _last_line_result(output: str) -> AgentResult:
    lines = output.strip().splitlines()
    try:
        last = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        return AgentResult()
    if isinstance(last, Mapping) and "reward" in last:
        return AgentResult(reward=last["reward"], metrics=last.get("metrics", {}))
    if isinstance(last, int | float) and not isinstance(last, bool):
        return AgentResult(reward=last)
    return AgentResult()
