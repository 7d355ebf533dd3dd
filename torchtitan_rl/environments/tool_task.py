"""Questions from data files that are answered with tools, and the tool ``python``: it runs
programs that the policy writes in the sandbox, and shows what they print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan_rl.environments.data_task import DataTask
from torchtitan_rl.environments.question import ToolAnswer, ToolEnv, Tools
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.rollout.chatml import ChatMLRenderer
from torchtitan_rl.rollout.env import TokenEnv
from torchtitan_rl.rollout.message_env import MessageTokenEnv
from torchtitan_rl.rollout.rendering import make_renderer
from torchtitan_rl.sandbox.sandbox import (
    SandboxConfig,
    SandboxLimits,
    SandboxResult,
    SandboxStatus,
    shared_sandbox,
)
from torchtitan_rl.types import Problem

if TYPE_CHECKING:
    from torchtitan_rl.rollout.config import RolloutConfig


def tool_environment(
    task: DataTask,
    tools: Tools,
    problem: Problem,
    tokenizer: Any,
    *,
    replays: bool,
    shows_tools: bool,
) -> TokenEnv:
    """A `ToolEnv` of one rollout that `DataTask.score` scores.

    Raises:
        ConfigError: the policy's chat format has no tools.
    """
    renderer = make_renderer(tokenizer, kind=task.renderer, thinking=task.thinking)
    if isinstance(renderer, ChatMLRenderer):
        raise ConfigError(
            "task: the policy's chat format has no tools; give a model that has (such as Qwen3), "
            "or task.renderer qwen3"
        )
    score = partial(task.score, problem=problem)
    messages = problem.data["messages"]
    env = ToolEnv(messages, tools, score, replays=replays, shows_tools=shows_tools)
    return MessageTokenEnv(env, renderer)


@dataclass(frozen=True, kw_only=True)
class PythonTask(DataTask):
    """Questions of a `DataTask` that are answered with the tool ``python``::

        PythonTask(train=("data/train.jsonl",), compare="number")

    A completion without a call is the answer. The programs run in ``sandbox``. Needs a model whose
    chat format has tools (Qwen3 and others), and room in ``rollout.max_turns`` for the calls.
    """

    shows_tools: bool = True
    """Whether the chat format puts the tool's schema into the prompt. Off where ``system``
    describes it in fewer tokens, or the policy knows it."""

    def environment(self, problem: Problem, *, tokenizer: Any, limits: RolloutConfig) -> TokenEnv:
        return tool_environment(
            self,
            PythonTools(self.sandbox),
            problem,
            tokenizer,
            replays=True,  # a program that prints something else is noticed then
            shows_tools=self.shows_tools,
        )

    def errors(self) -> list[str]:
        return list(dict.fromkeys(super().errors() + self.sandbox.errors("task.sandbox")))


PYTHON: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program and returns what it prints, and the value of its "
        "last line. Each call starts afresh.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}


class PythonTools:
    """The tool ``python`` for a rollout or an agent; each call starts afresh.

    All share one sandbox (see `shared_sandbox`)::

        ToolEnv(messages, PythonTools(), score, replays=True)

    An agent calls it itself::

        answer = await PythonTools().call("python", {"code": "print(6 * 7)"})

    With ``traceback`` the policy also reads where an exception was raised.
    """

    def __init__(self, config: SandboxConfig | None = None, *, traceback: bool = True) -> None:
        self._config = config or SandboxConfig()
        self._traceback = traceback

    async def open(self) -> Sequence[Mapping[str, Any]]:
        return [PYTHON]

    async def call(self, name: str, arguments: Mapping[str, Any], /) -> ToolAnswer:
        """
        Raises:
            SandboxError: the sandbox has failed.
            ConfigError: this machine does not allow its isolation.
        """
        if name != "python":
            return ToolAnswer(text=f"error: no tool {name!r}; there is python", failed=True)
        code = arguments.get("code")
        if not isinstance(code, str):
            return ToolAnswer(text="error: python needs the argument code, a text", failed=True)
        result = await shared_sandbox(self._config).run(code, print_last=True)
        if not self._traceback:
            result = replace(result, stderr=result.stderr.strip().rpartition("\n")[2])
        text = _shown(result, self._config.limits)
        return ToolAnswer(text=text, failed=result.status is not SandboxStatus.OK)

    async def close(self) -> None:
        """Releases nothing: the sandbox is shared."""


def _shown(result: SandboxResult, limits: SandboxLimits) -> str:
    """A result as a policy reads it."""
    stopped = {
        SandboxStatus.TIMEOUT: f"stopped after {limits.wall_s:g} s",
        SandboxStatus.CPU: f"stopped after {limits.cpu_s:g} s of CPU time",
        SandboxStatus.MEMORY: f"stopped at {limits.memory_mb} MB of memory",
        SandboxStatus.LIMIT: f"stopped at {limits.processes} threads or {limits.file_mb} MB in "
        f"{limits.files} files",
        SandboxStatus.KILLED: f"killed by signal {-result.exit_code}",
    }
    notes = [f"error: {stopped[result.status]}"] if result.status in stopped else []
    if result.is_truncated:
        notes.append(f"(only the first {limits.output_bytes} bytes of the output)")
    parts = [result.stdout, result.stderr, *notes]
    return "\n".join(part.strip("\n") for part in parts if part) or "(no output)"
