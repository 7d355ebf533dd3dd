"""Agents of all libraries, through HTTP and a vLLM engine, and the examples of the documentation:
``python -m tests.real.agent_libraries_scenario``.

It prints one JSON object: for each library and each example, what its rollouts have.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from typing import Any

from torchtitan_rl.backends.vllm.cpu import engine_environment

os.environ.update(engine_environment(1))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.real.local_endpoint import local_endpoint
from tests.support.documented_agents import documented_agents
from tests.support.endpoints import endpoint_spec
from tests.support.loop_replica import loop_replica
from torchtitan_rl import (
    AgentEnv,
    AgentHost,
    Episode,
    Problem,
    Rollout,
    RolloutConfig,
    SamplingConfig,
)
from torchtitan_rl.agents.env import AgentThread
from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.engine import VllmEngine
from torchtitan_rl.backends.vllm.openai import build_application
from torchtitan_rl.experiments.agent_libraries.libraries import LIBRARIES, Library
from torchtitan_rl.experiments.agent_libraries.task import POLICY_DIR, AgentLibrariesTask
from torchtitan_rl.generation.config import GeneratorConfig
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.config import Keys
from torchtitan_rl.serving.link import ControllerLink
from torchtitan_rl.serving.sessions import Sessions

MAX_MODEL_LEN = 4096  # for smolagents, whose prompts have much that is no word of the policy
GROUP_SIZE = 12  # of which some ask first, and some call at once
CONFIG = RolloutConfig(
    max_turns=16,
    max_total_tokens=MAX_MODEL_LEN,
    step_timeout_s=120.0,
    sampling=SamplingConfig(temperature=1.0, max_tokens_per_turn=48),
)
EXERCISE = {
    "text": "Nina has some apples. Boris brings 25 more. How many are there now?",
    "missing": 17,
    "expression": "17+25",
    "answer": 42,
}
DOCUMENTED = {
    "question": "Nina has 17 apples. Boris brings 25 more. How many are there now?",
    "answer": "42",
}


class Policy:
    """The policy in transformers: what the engine's logprobs must be."""

    def __init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(POLICY_DIR, dtype=torch.float32)

    @torch.no_grad()
    def largest_difference(self, episode: Episode) -> float:
        """Of the trained tokens' logprobs."""
        token_ids = torch.tensor(episode.token_ids)
        logits = self._model(token_ids[None]).logits[0, :-1] / CONFIG.sampling.temperature
        expected = logits.log_softmax(-1).gather(-1, token_ids[1:, None])[:, 0]
        differences = (expected - torch.tensor(episode.logprobs[1:])).abs()
        return float(differences[torch.tensor(episode.loss_mask[1:])].max())


def described(rollout: Rollout, policy: Policy) -> dict[str, Any]:
    episodes = rollout_to_episodes(rollout, 1.0)
    return {
        "status": rollout.status.value,
        "cause": rollout.cause,
        "reward": rollout.reward,
        "metrics": dict(rollout.metrics),
        "texts": [turn.text for turn in rollout.turns],
        "num_sampled": sum(len(turn.completion.token_ids) for turn in rollout.turns),
        "num_trained": sum(sum(episode.loss_mask) for episode in episodes),
        "num_episodes": len(episodes),
        "logprob_difference": max(map(policy.largest_difference, episodes), default=0.0),
    }


async def play(router: GeneratorRouter, host: AgentHost, tokenizer: Any) -> dict[str, Any]:
    policy = Policy()

    async def roll_out(name: str, data: dict[str, Any], environment: Any) -> Any:
        rollouter = Rollouter(generate=router.generate, environment=environment, config=CONFIG)
        problem = Problem(problem_id="problem/0", data=data)
        group = await rollouter.run_group(name, problem, size=GROUP_SIZE, seed=3)
        return name, [described(rollout, policy) for rollout in group.rollouts]

    def with_library(library: Library) -> Any:
        task = AgentLibrariesTask(libraries=(library,))

        def environment(problem: Problem) -> Any:
            return task.agent_environment(problem, tokenizer=tokenizer, limits=CONFIG, host=host)

        return roll_out(library, EXERCISE, environment)

    def from_documentation(name: str, agent: Any) -> Any:
        def environment(problem: Problem) -> Any:
            return AgentEnv(agent=agent, problem=problem, host=host, decode=tokenizer.decode)

        return roll_out(name, DOCUMENTED, environment)

    return dict(
        await asyncio.gather(
            *(with_library(library) for library in LIBRARIES),
            *(from_documentation(name, agent) for name, agent in documented_agents().items()),
        )
    )


async def main() -> None:
    generator = GeneratorConfig(max_model_len=MAX_MODEL_LEN, kv_cache_bytes=64 << 20)
    engine = VllmEngine(GeneratorSpec(model=POLICY_DIR, generator=generator))
    loop = EngineLoop(engine, None, is_leader=True)
    loop.start()
    router = GeneratorRouter([loop_replica("replica0", loop)])
    sessions = Sessions(router)
    spec = endpoint_spec(
        POLICY_DIR, max_model_len=MAX_MODEL_LEN, tool_call_parser="hermes", constraints="free"
    )
    spec = replace(spec, generation_config="vllm")  # as in a training run

    def application(link: ControllerLink) -> EndpointApp:
        inner = build_application(spec, link)
        return EndpointApp(inner, spec.endpoint, keys=Keys(), commands=link)

    tokenizer = AutoTokenizer.from_pretrained(POLICY_DIR)
    async with local_endpoint(application, sessions.complete, handlers=sessions.handlers()) as url:
        with AgentThread() as agents:
            host = AgentHost(
                base_url=f"{url}/v1", model="policy", sessions=sessions, loop=agents.loop
            )
            results = await play(router, host, tokenizer)
        counts = dict(sessions.counts())
    await sessions.aclose()
    await router.close()
    print(json.dumps({"rollouts": results, "counts": counts}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
