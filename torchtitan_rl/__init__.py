"""RL post-training for PyTorch: torchtitan trains, vLLM generates, Monarch orchestrates.

This module exports what tasks, environments, rubrics, agents and configurations import; all other
modules may change without notice. Names are loaded when they are first used, so that importing the
package takes no time and needs neither torch nor vLLM nor Monarch.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_rl.agents.agent import Agent as Agent
    from torchtitan_rl.agents.agent import AgentCall as AgentCall
    from torchtitan_rl.agents.agent import AgentCommand as AgentCommand
    from torchtitan_rl.agents.agent import AgentError as AgentError
    from torchtitan_rl.agents.agent import AgentResult as AgentResult
    from torchtitan_rl.agents.agent import RemoteAgent as RemoteAgent
    from torchtitan_rl.agents.env import AgentEnv as AgentEnv
    from torchtitan_rl.agents.env import AgentHost as AgentHost
    from torchtitan_rl.agents.task import AgentTask as AgentTask
    from torchtitan_rl.agents.task import RemoteAgentTask as RemoteAgentTask
    from torchtitan_rl.agents.verifiers.task import VerifiersError as VerifiersError
    from torchtitan_rl.agents.verifiers.task import VerifiersTask as VerifiersTask
    from torchtitan_rl.backends.titan.trainer import PolicyTrainer as PolicyTrainer
    from torchtitan_rl.config.lora import LoraConfig as LoraConfig
    from torchtitan_rl.config.run import LaunchConfig as LaunchConfig
    from torchtitan_rl.config.run import MetricsConfig as MetricsConfig
    from torchtitan_rl.config.run import MonarchConfig as MonarchConfig
    from torchtitan_rl.config.run import PolicyConfig as PolicyConfig
    from torchtitan_rl.config.run import RunConfig as RunConfig
    from torchtitan_rl.config.supervised import DpoConfig as DpoConfig
    from torchtitan_rl.config.supervised import SftConfig as SftConfig
    from torchtitan_rl.data.conversations import ExamplesConfig as ExamplesConfig
    from torchtitan_rl.data.conversations import PairsConfig as PairsConfig
    from torchtitan_rl.data.curriculum import CurriculumConfig as CurriculumConfig
    from torchtitan_rl.data.curriculum import RestConfig as RestConfig
    from torchtitan_rl.data.row_dataset import ListDataset as ListDataset
    from torchtitan_rl.distillation.config import TeacherConfig as TeacherConfig
    from torchtitan_rl.environments.data_task import DataTask as DataTask
    from torchtitan_rl.environments.data_task import PythonTask as PythonTask
    from torchtitan_rl.environments.data_task import PythonTools as PythonTools
    from torchtitan_rl.environments.games import Game as Game
    from torchtitan_rl.environments.games import GameTask as GameTask
    from torchtitan_rl.environments.games import InvalidActionError as InvalidActionError
    from torchtitan_rl.environments.games import Move as Move
    from torchtitan_rl.environments.gymnasium_task import GymnasiumTask as GymnasiumTask
    from torchtitan_rl.environments.judge import Judge as Judge
    from torchtitan_rl.environments.judge import JudgeConfig as JudgeConfig
    from torchtitan_rl.environments.judge import JudgedTask as JudgedTask
    from torchtitan_rl.environments.mcp import McpServer as McpServer
    from torchtitan_rl.environments.mcp import McpServerError as McpServerError
    from torchtitan_rl.environments.mcp import McpTask as McpTask
    from torchtitan_rl.environments.mcp import McpTools as McpTools
    from torchtitan_rl.environments.mixture import MixtureTask as MixtureTask
    from torchtitan_rl.environments.open_env import OpenEnvError as OpenEnvError
    from torchtitan_rl.environments.open_env import OpenEnvTask as OpenEnvTask
    from torchtitan_rl.environments.pairwise_judge import PairwiseJudgedTask as PairwiseJudgedTask
    from torchtitan_rl.environments.pairwise_judge import pairwise_judge as pairwise_judge
    from torchtitan_rl.environments.question import QuestionEnv as QuestionEnv
    from torchtitan_rl.environments.question import ToolAnswer as ToolAnswer
    from torchtitan_rl.environments.question import ToolEnv as ToolEnv
    from torchtitan_rl.environments.question import Tools as Tools
    from torchtitan_rl.environments.reasoning_gym import ReasoningGymTask as ReasoningGymTask
    from torchtitan_rl.environments.scoring import CheckFailedError as CheckFailedError
    from torchtitan_rl.environments.scoring import CheckTimeoutError as CheckTimeoutError
    from torchtitan_rl.environments.scoring import checked_score as checked_score
    from torchtitan_rl.environments.scoring import run_checker as run_checker
    from torchtitan_rl.environments.supervised import HeldOutConfig as HeldOutConfig
    from torchtitan_rl.errors import ConfigError as ConfigError
    from torchtitan_rl.errors import TorchtitanRLError as TorchtitanRLError
    from torchtitan_rl.generation.config import GeneratorConfig as GeneratorConfig
    from torchtitan_rl.images import ImageReader as ImageReader
    from torchtitan_rl.images import PromptImage as PromptImage
    from torchtitan_rl.images import place_images as place_images
    from torchtitan_rl.orchestration.config import CheckpointConfig as CheckpointConfig
    from torchtitan_rl.orchestration.config import EvaluationConfig as EvaluationConfig
    from torchtitan_rl.orchestration.config import ScheduleConfig as ScheduleConfig
    from torchtitan_rl.rollout.chatml import Message as Message
    from torchtitan_rl.rollout.config import OverlongConfig as OverlongConfig
    from torchtitan_rl.rollout.config import RolloutConfig as RolloutConfig
    from torchtitan_rl.rollout.config import SamplingConfig as SamplingConfig
    from torchtitan_rl.rollout.env import Observation as Observation
    from torchtitan_rl.rollout.env import Stateful as Stateful
    from torchtitan_rl.rollout.env import Terminal as Terminal
    from torchtitan_rl.rollout.env import TokenEnv as TokenEnv
    from torchtitan_rl.rollout.env import threaded as threaded
    from torchtitan_rl.rollout.message_env import MessageEnv as MessageEnv
    from torchtitan_rl.rollout.message_env import MessageObservation as MessageObservation
    from torchtitan_rl.rollout.message_env import MessageTokenEnv as MessageTokenEnv
    from torchtitan_rl.rollout.rendering import ChatRenderer as ChatRenderer
    from torchtitan_rl.rollout.rendering import RendererKind as RendererKind
    from torchtitan_rl.rollout.rendering import Thinking as Thinking
    from torchtitan_rl.rollout.rendering import make_renderer as make_renderer
    from torchtitan_rl.rollout.rubric import RewardFunction as RewardFunction
    from torchtitan_rl.rollout.rubric import Rubric as Rubric
    from torchtitan_rl.rollout.rubric import Score as Score
    from torchtitan_rl.rollout.task import AdaptiveDataset as AdaptiveDataset
    from torchtitan_rl.rollout.task import Dataset as Dataset
    from torchtitan_rl.rollout.task import MeasuredDataset as MeasuredDataset
    from torchtitan_rl.rollout.task import Outcome as Outcome
    from torchtitan_rl.rollout.task import Split as Split
    from torchtitan_rl.rollout.task import Task as Task
    from torchtitan_rl.rollout.tree import RolloutEnv as RolloutEnv
    from torchtitan_rl.rollout.tree import TreeEnv as TreeEnv
    from torchtitan_rl.rollout.tree import TurnTree as TurnTree
    from torchtitan_rl.sandbox.sandbox import Sandbox as Sandbox
    from torchtitan_rl.sandbox.sandbox import SandboxConfig as SandboxConfig
    from torchtitan_rl.sandbox.sandbox import SandboxError as SandboxError
    from torchtitan_rl.sandbox.sandbox import SandboxLimits as SandboxLimits
    from torchtitan_rl.sandbox.sandbox import SandboxResult as SandboxResult
    from torchtitan_rl.sandbox.sandbox import SandboxStatus as SandboxStatus
    from torchtitan_rl.sandbox.sandbox import shared_sandbox as shared_sandbox
    from torchtitan_rl.serving.config import EndpointConfig as EndpointConfig
    from torchtitan_rl.training.config import LossConfig as LossConfig
    from torchtitan_rl.training.config import OptimizerConfig as OptimizerConfig
    from torchtitan_rl.training.config import ProfileConfig as ProfileConfig
    from torchtitan_rl.training.config import TrainerConfig as TrainerConfig
    from torchtitan_rl.training.losses.metrics import LossOutput as LossOutput
    from torchtitan_rl.training.losses.metrics import LossTokens as LossTokens
    from torchtitan_rl.training.losses.metrics import StepTotals as StepTotals
    from torchtitan_rl.training.losses.policy import policy_loss as policy_loss
    from torchtitan_rl.training.packing import pack_episodes as pack_episodes
    from torchtitan_rl.types import Completion as Completion
    from torchtitan_rl.types import Episode as Episode
    from torchtitan_rl.types import FinishReason as FinishReason
    from torchtitan_rl.types import Problem as Problem
    from torchtitan_rl.types import Rollout as Rollout
    from torchtitan_rl.types import RolloutStatus as RolloutStatus
    from torchtitan_rl.types import Turn as Turn
    from torchtitan_rl.weights.config import WeightSyncConfig as WeightSyncConfig

__version__ = "0.1.0"

_HOMES = {  # the module of each exported name, read from the import statements above
    alias.name: node.module
    for node in ast.walk(ast.parse(Path(__file__).read_text()))
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{__name__}.")
    for alias in node.names
}
__all__ = sorted(_HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
