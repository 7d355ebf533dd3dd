"""Questions from data files that the policy answers with the help of programs that it writes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torchtitan_rl.environments.data_task import DataTask
from torchtitan_rl.environments.python_tools import PythonTools
from torchtitan_rl.environments.tool_env import ToolEnv
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.rollout.chatml import ChatMLRenderer
from torchtitan_rl.rollout.env import TokenEnv
from torchtitan_rl.rollout.message_env import MessageTokenEnv
from torchtitan_rl.rollout.rendering import make_renderer
from torchtitan_rl.types import Problem

if TYPE_CHECKING:
    from torchtitan_rl.rollout.config import RolloutConfig


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
        renderer = make_renderer(tokenizer, kind=self.renderer, thinking=self.thinking)
        if isinstance(renderer, ChatMLRenderer):
            raise ConfigError(
                "task: the policy's chat format has no tools; give a model that has (such as "
                "Qwen3), or task.renderer qwen3"
            )
        env = ToolEnv(
            problem.data["messages"],
            PythonTools(self.sandbox),
            partial(self.score, problem=problem),
            replays=True,  # a program that prints something else is noticed then
            shows_tools=self.shows_tools,
        )
        return MessageTokenEnv(env, renderer)

    def errors(self) -> list[str]:
        return list(dict.fromkeys(super().errors() + self.sandbox.errors("task.sandbox")))
