"""A plain synchronous loop over real processes, to compare the controller with: problems, rollouts
one group after another, batch, optimizer step, weights over; again. Then the policy is written.

Usage: plain_loop.py CONFIG [options], as for ``torchtitan-rl train``.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

from torchtitan_rl.backends.monarch.run import run_processes
from torchtitan_rl.config.loader import load_config
from torchtitan_rl.config.prepare import PreparedRun, prepare_run
from torchtitan_rl.orchestration.batching import EpisodeBatcher
from torchtitan_rl.rollout.rendering import load_tokenizer
from torchtitan_rl.rollout.rollouter import Rollouter
from torchtitan_rl.routing.router import GeneratorRouter


async def loop(prepared: PreparedRun) -> None:
    config = prepared.config
    tokenizer = load_tokenizer(prepared.policy_dir)
    dataset = config.task.dataset("train", seed=config.seed)
    batcher = EpisodeBatcher(
        config=config.rollout,
        row_len=config.trainer.max_episode_tokens,
    )
    async with run_processes(prepared, trace_dir=None) as processes:
        router = GeneratorRouter(processes.replicas)
        rollouter = Rollouter(
            generate=router.generate,
            environment=partial(
                config.task.environment, tokenizer=tokenizer, limits=config.rollout
            ),
            config=config.rollout,
            rubric=config.task.rubric(),
        )
        for _ in range(config.num_steps):
            groups = []
            for _ in range(config.rollout.groups_per_step):
                problem = dataset.next()
                groups.append(
                    await rollouter.run_group(
                        f"e{dataset.epoch}/{problem.problem_id}",
                        problem,
                        size=config.rollout.group_size,
                        seed=config.seed,
                    )
                )
            batch = batcher(groups).batch
            assert batch is not None, [(r.status, r.cause) for g in groups for r in g.rollouts]
            await processes.trainers[0].train_step(batch)
            await router.sync_weights(await processes.trainers[0].publish(), mode="hot_swap")
        await processes.trainers[0].export_hf(config.run_dir.absolute() / "policy")


if __name__ == "__main__":
    prepared = prepare_run(load_config(Path(sys.argv[1]), sys.argv[2:]))
    prepared.config.log_dir.mkdir(parents=True, exist_ok=True)
    asyncio.run(loop(prepared))
