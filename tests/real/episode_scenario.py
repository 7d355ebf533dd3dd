"""Rolls problems out on real engines and compares what is trained on with what was sampled.

Run as ``python -m tests.real.episode_scenario MODEL...``: vLLM takes a process of its own. Prints
one JSON object, with the rollouts of each model.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.loop_replica import loop_replica
from torchtitan_rl.backends.vllm.cpu import engine_environment
from torchtitan_rl.configs.alphabet_sort_tiny import config
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.types import Completion, Rollout


class RecordingEngine:
    """Keeps what the engine put out, before anything of ours touched it."""

    def __init__(self, engine) -> None:
        self._engine = engine
        self.outputs: dict[str, Completion] = {}

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def step(self) -> list[Completion]:
        outputs = self._engine.step()
        self.outputs |= {output.request_id: output for output in outputs}
        return outputs


def compare(rollout: Rollout, outputs: dict[str, Completion]) -> dict[str, Any]:
    """The one episode of a rollout, and whether it holds the engine's tokens, and no others."""
    (episode,) = rollout_to_episodes(rollout, advantage=1.0)
    sampled = [outputs[turn.completion.request_id] for turn in rollout.turns]
    tokens = tuple(token for output in sampled for token in output.token_ids)
    logprobs = tuple(logprob for output in sampled for logprob in output.logprobs)
    masked = [i for i, is_trained in enumerate(episode.loss_mask) if is_trained]
    last = rollout.turns[-1]
    whole = last.prompt_token_ids + last.completion.token_ids
    return {
        "turns": len(rollout.turns),
        "tokens_equal": tuple(episode.token_ids[i] for i in masked) == tokens,
        "logprobs_equal": tuple(episode.logprobs[i] for i in masked) == logprobs,
        "sequence_equal": episode.token_ids == whole,
        "episode": asdict(episode),
    }


async def scenario(engine: RecordingEngine, tokenizer) -> list[dict[str, Any]]:
    loop = EngineLoop(engine, None, is_leader=True)
    loop.start()
    router = GeneratorRouter([loop_replica("only", loop)])
    task = replace(config.task, min_turns=3, max_turns=3)
    rollouter = Rollouter(
        generate=router.generate,
        environment=partial(task.environment, tokenizer=tokenizer, limits=config.rollout),
        config=config.rollout,
    )
    dataset = task.dataset("validation", seed=0)
    groups = await asyncio.gather(
        *(rollouter.run_group(f"g{i}", dataset.next(), size=4, seed=1) for i in range(8))
    )
    await router.close()
    return [compare(rollout, engine.outputs) for group in groups for rollout in group.rollouts]


def main() -> None:
    import os

    os.environ |= engine_environment(1)
    from transformers import AutoTokenizer

    from torchtitan_rl.backends.specs import GeneratorSpec
    from torchtitan_rl.backends.vllm.engine import VllmEngine

    rollouts = {}
    for model in sys.argv[1:]:
        engine = RecordingEngine(VllmEngine(GeneratorSpec(model=Path(model))))
        tokenizer = AutoTokenizer.from_pretrained(model)
        rollouts[model] = asyncio.run(scenario(engine, tokenizer))
    print(json.dumps(rollouts))


if __name__ == "__main__":
    main()
