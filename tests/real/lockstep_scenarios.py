"""Two scripted engines in lockstep over gloo: ``SCENARIO TIMEOUT_S HEARTBEAT_S PORT ...``, which
may be repeated. All run at once, each rank in a fork of this process: an import of vLLM takes long.

Prints, as JSON, one word of each rank 0 for what happened.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import Future
from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch.distributed as dist

from tests.support.scripted_engine import ScriptedEngine
from torchtitan_rl.backends.vllm.engine import GlooLockstep
from torchtitan_rl.errors import LoopFailedError
from torchtitan_rl.generation.config import LoopConfig
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.types import Completion, GenerationRequest, SamplingParams

WAIT_S = 200.0


def submit(
    loop: EngineLoop, name: str, prompt_len: int = 3, max_tokens: int = 20
) -> Future[Completion]:
    return loop.submit(
        GenerationRequest(
            request_id=name,
            prompt_token_ids=tuple(index % 1000 for index in range(prompt_len)),
            sampling=SamplingParams(max_tokens=max_tokens),
        )
    )


def lead(scenario: str, loop: EngineLoop, timeout_s: float) -> str:
    # A decision of several kilobytes goes in two messages, a small one in one.
    big, small = submit(loop, "big", 8000), submit(loop, "small")
    big.result(WAIT_S)
    small.result(WAIT_S)
    if scenario == "idle":
        time.sleep(1.5 * timeout_s)
    try:
        # Long enough for the loss of a peer to show in what is sent to it.
        submit(loop, "late", max_tokens=2000).result(WAIT_S)
    except LoopFailedError:
        return "failed"
    return "completed"


def play(
    scenario: str, timeout_s: str, heartbeat_s: str, port: str, rank: int, leader: Connection
) -> None:
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update(variables, RANK=str(rank))
    dist.init_process_group("gloo")
    # The follower of "lost" dies in its 50th step, in the middle of the last request.
    is_lost = scenario == "lost" and rank == 1
    loop = EngineLoop(
        ScriptedEngine(max_model_len=10_000, fail_at_step=50 if is_lost else None),
        GlooLockstep(timeout_s=float(timeout_s)),
        is_leader=rank == 0,
        config=LoopConfig(heartbeat_s=float(heartbeat_s), max_steps_per_decision=1),
        on_end=lambda failure: os._exit(1) if failure and rank else None,
    )
    loop.start()
    if rank == 0:
        leader.send(lead(scenario, loop, float(timeout_s)))
        loop.close()
    loop.join(WAIT_S)


if __name__ == "__main__":
    context = get_context("fork")
    leaders = []
    for start in range(1, len(sys.argv), 4):
        said, leader = context.Pipe(duplex=False)
        leaders.append(said)
        for rank in range(2):
            arguments = (*sys.argv[start : start + 4], rank, leader)
            context.Process(target=play, args=arguments, daemon=True).start()
    print(json.dumps([said.recv() if said.poll(3 * WAIT_S) else "hung" for said in leaders]))
