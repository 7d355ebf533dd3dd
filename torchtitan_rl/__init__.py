"""RL post-training for PyTorch: torchtitan trains, vLLM generates, Monarch orchestrates.

This module exports what tasks, environments, rubrics, agents and configurations import; all other
modules may change without notice. Names are loaded when they are first used, so that importing the
package takes no time and needs neither torch nor vLLM nor Monarch.
"""

from __future__ import annotations

import ast
import functools
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_rl.agents.agent import (
        Agent,
        AgentCall,
        AgentCommand,
        AgentError,
        AgentResult,
        RemoteAgent,
    )
    from torchtitan_rl.agents.env import AgentEnv, AgentHost
    from torchtitan_rl.agents.task import AgentTask, RemoteAgentTask
    from torchtitan_rl.agents.verifiers.task import VerifiersError, VerifiersTask
    from torchtitan_rl.backends.titan.trainer import PolicyTrainer
    from torchtitan_rl.config import (
        CheckpointConfig,
        EndpointConfig,
        EvaluationConfig,
        GeneratorConfig,
        LaunchConfig,
        LossConfig,
        MetricsConfig,
        OptimizerConfig,
        OverlongConfig,
        PolicyConfig,
        RolloutConfig,
        RunConfig,
        SamplingConfig,
        ScheduleConfig,
        TrainerConfig,
        WeightSyncConfig,
    )
    from torchtitan_rl.data.curriculum import CurriculumConfig, RestConfig
    from torchtitan_rl.data.row_dataset import ListDataset
    from torchtitan_rl.environments.data_task import DataTask
    from torchtitan_rl.environments.games import Game, GameTask, InvalidActionError, Move
    from torchtitan_rl.environments.gymnasium_task import GymnasiumTask
    from torchtitan_rl.environments.judge import Judge, JudgeConfig, JudgedTask
    from torchtitan_rl.environments.mcp import McpServer, McpServerError, McpTask, McpTools
    from torchtitan_rl.environments.mixture import MixtureTask
    from torchtitan_rl.environments.open_env import OpenEnvError, OpenEnvTask
    from torchtitan_rl.environments.question import QuestionEnv, ToolAnswer, ToolEnv, Tools
    from torchtitan_rl.environments.reasoning_gym import ReasoningGymTask
    from torchtitan_rl.environments.scoring import (
        CheckFailedError,
        CheckTimeoutError,
        checked_score,
        run_checker,
    )
    from torchtitan_rl.environments.tool_task import PythonTask, PythonTools
    from torchtitan_rl.errors import ConfigError, TorchtitanRLError
    from torchtitan_rl.rollout.chatml import Message
    from torchtitan_rl.rollout.env import (
        Observation,
        Stateful,
        Terminal,
        TokenEnv,
        threaded,
    )
    from torchtitan_rl.rollout.message_env import MessageEnv, MessageObservation, MessageTokenEnv
    from torchtitan_rl.rollout.rendering import ChatRenderer, RendererKind, Thinking, make_renderer
    from torchtitan_rl.rollout.rubric import RewardFunction, Rubric, Score
    from torchtitan_rl.rollout.task import (
        AdaptiveDataset,
        Dataset,
        MeasuredDataset,
        Outcome,
        Split,
        Task,
    )
    from torchtitan_rl.rollout.tree import RolloutEnv, TreeEnv, TurnTree
    from torchtitan_rl.sandbox.sandbox import (
        Sandbox,
        SandboxConfig,
        SandboxError,
        SandboxLimits,
        SandboxResult,
        SandboxStatus,
        shared_sandbox,
    )
    from torchtitan_rl.training.losses.policy import policy_loss
    from torchtitan_rl.training.losses.tokens import LossOutput, LossTokens, StepTotals
    from torchtitan_rl.training.packing import pack_episodes
    from torchtitan_rl.types import (
        Completion,
        Episode,
        FinishReason,
        Problem,
        Rollout,
        RolloutStatus,
        Turn,
    )

__version__ = "0.1.0"

__all__ = [
    "AdaptiveDataset",
    "Agent",
    "AgentCall",
    "AgentCommand",
    "AgentEnv",
    "AgentError",
    "AgentHost",
    "AgentResult",
    "AgentTask",
    "ChatRenderer",
    "CheckFailedError",
    "CheckTimeoutError",
    "CheckpointConfig",
    "Completion",
    "ConfigError",
    "CurriculumConfig",
    "DataTask",
    "Dataset",
    "EndpointConfig",
    "Episode",
    "EvaluationConfig",
    "FinishReason",
    "Game",
    "GameTask",
    "GeneratorConfig",
    "GymnasiumTask",
    "InvalidActionError",
    "Judge",
    "JudgeConfig",
    "JudgedTask",
    "LaunchConfig",
    "ListDataset",
    "LossConfig",
    "LossOutput",
    "LossTokens",
    "McpServer",
    "McpServerError",
    "McpTask",
    "McpTools",
    "MeasuredDataset",
    "Message",
    "MessageEnv",
    "MessageObservation",
    "MessageTokenEnv",
    "MetricsConfig",
    "MixtureTask",
    "Move",
    "Observation",
    "OpenEnvError",
    "OpenEnvTask",
    "OptimizerConfig",
    "Outcome",
    "OverlongConfig",
    "PolicyConfig",
    "PolicyTrainer",
    "Problem",
    "PythonTask",
    "PythonTools",
    "QuestionEnv",
    "ReasoningGymTask",
    "RemoteAgent",
    "RemoteAgentTask",
    "RendererKind",
    "RestConfig",
    "RewardFunction",
    "Rollout",
    "RolloutConfig",
    "RolloutEnv",
    "RolloutStatus",
    "Rubric",
    "RunConfig",
    "SamplingConfig",
    "Sandbox",
    "SandboxConfig",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "SandboxStatus",
    "ScheduleConfig",
    "Score",
    "Split",
    "Stateful",
    "StepTotals",
    "Task",
    "Terminal",
    "Thinking",
    "TokenEnv",
    "ToolAnswer",
    "ToolEnv",
    "Tools",
    "TorchtitanRLError",
    "TrainerConfig",
    "TreeEnv",
    "Turn",
    "TurnTree",
    "VerifiersError",
    "VerifiersTask",
    "WeightSyncConfig",
    "checked_score",
    "make_renderer",
    "pack_episodes",
    "policy_loss",
    "run_checker",
    "shared_sandbox",
    "threaded",
]

_OLD_NAMES = {"Conversation": object, "Replayable": object}  # attributes now: see `TokenEnv`


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_homes()[name]), name)
    if name in _OLD_NAMES:
        return _OLD_NAMES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _homes() -> dict[str, str]:
    """The module of each name, as the imports above have it."""
    nodes = ast.walk(ast.parse(Path(__file__).read_text()))
    found = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in found for alias in node.names}
