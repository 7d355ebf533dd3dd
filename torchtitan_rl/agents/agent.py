"""What an agent is: code of anybody's that speaks the OpenAI API and says what it was worth.

An agent is an async function, a plain one (it gets a thread of its own, and may block), or a
command. It is told where the endpoint is, and has an API key that names its session: whatever it
asks for with that key becomes the turns of its rollout. Its session is over when it returns, when
its rollout reaches a limit, or when somebody closes it; then its requests are refused (HTTP 400,
code ``session_closed``).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.agents.subprocess import run_command
from torchtitan_rl.errors import TorchtitanRLError
from torchtitan_rl.rollout.calls import call
from torchtitan_rl.rollout.records import problem_to_json
from torchtitan_rl.types import Problem

if TYPE_CHECKING:
    from torchtitan_rl.serving.sessions import Sessions

_SECRETS = ("TORCHTITAN_RL_API_KEY", "TORCHTITAN_RL_ADMIN_KEY")  # not for agents
_MAX_OUTPUT_BYTES = 16 << 20
_MAX_ENVIRONMENT_BYTES = 96 << 10  # of one variable; Linux refuses those over 128 KiB
_STDERR_CHARS = 400


class AgentError(TorchtitanRLError):
    """An agent did not do what agents have to; its rollout fails, and no other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """All that an agent is given. ``base_url`` ends in ``/v1``; ``api_key`` names the session."""

    base_url: str
    api_key: str = field(repr=False)
    model: str
    problem: Problem
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResult:
    """What an agent may return instead of a bare number. ``reward`` None leaves it to the rubric,
    or to whoever closes the session with one."""

    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()  # the conversation, for the records


AgentAnswer = float | AgentResult | None
AgentFunction = Callable[[AgentCall], AgentAnswer | Awaitable[AgentAnswer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """A program that is an agent.

    It finds what it needs in ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``TORCHTITAN_RL_MODEL`` and
    ``TORCHTITAN_RL_SESSION_ID``, and its problem as JSON (``problem_id``, ``data``) on stdin and,
    where it is not too long for that, in ``TORCHTITAN_RL_PROBLEM``. The last line of its output is
    its reward: a number, or ``{"reward": number, "metrics": {name: number}}``; anything else is
    none. It fails by an exit code other than 0. Nothing that it started outlives it.
    """

    argv: tuple[str, ...]
    cwd: str | Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of ours
    timeout_s: float = 24 * 3600.0  # a rollout's own limits are usually reached first


Agent = AgentFunction | AgentCommand


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentHost:
    """Where agents find the endpoint, and where they run.

    ``loop``: the event loop, of another thread, that runs async agents (`AgentThread`); None is the
    current one, on which an agent that blocks would wait for itself for ever.
    """

    base_url: str
    model: str
    sessions: Sessions
    api_key: str = field(default="", repr=False)  # empty: the endpoint has none
    loop: asyncio.AbstractEventLoop | None = None

    def call(self, problem: Problem, session_id: str) -> AgentCall:
        return AgentCall(
            base_url=self.base_url,
            api_key=f"{self.api_key or 'agent'}:{session_id}",
            model=self.model,
            problem=problem,
            session_id=session_id,
        )


async def run_agent(agent: Agent, given: AgentCall) -> AgentResult:
    """Run an agent to its end.

    Raises:
        AgentError: a command failed.
        Exception: what a function raised.
    """
    if isinstance(agent, AgentCommand):
        return await _run_command(agent, given)
    answer = await call(agent, given)
    return answer if isinstance(answer, AgentResult) else AgentResult(reward=answer)


async def _run_command(command: AgentCommand, given: AgentCall) -> AgentResult:
    problem = json.dumps(problem_to_json(given.problem))
    environment = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    environment |= {
        "OPENAI_BASE_URL": given.base_url,
        "OPENAI_API_KEY": given.api_key,
        "TORCHTITAN_RL_MODEL": given.model,
        "TORCHTITAN_RL_SESSION_ID": given.session_id,
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
        how = (
            f"timed out after {command.timeout_s} s"
            if result.timed_out
            else f"was killed by signal {result.signal}"
            if result.signal is not None
            else f"ended with exit code {result.exit_code}"
        )
        said = result.stderr.decode(errors="replace").strip()[-_STDERR_CHARS:]
        raise AgentError(f"{program} {how}: {said or 'it wrote nothing to stderr'}")
    if result.truncated:
        raise AgentError(f"{program} wrote over {_MAX_OUTPUT_BYTES >> 20} MiB; its end is lost")
    return _last_line_result(result.stdout.decode(errors="replace"))


def _last_line_result(output: str) -> AgentResult:
    lines = output.strip().splitlines()
    try:
        said = json.loads(lines[-1]) if lines else None
    except ValueError:
        return AgentResult()
    if isinstance(said, Mapping) and "reward" in said:
        return AgentResult(reward=said["reward"], metrics=said.get("metrics", {}))
    if isinstance(said, int | float) and not isinstance(said, bool):
        return AgentResult(reward=said)
    return AgentResult()
