"""Episodes, trainers and process groups for the tests of the trainer."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from tests.support.episodes import random_set
from torchtitan_rl.config.lora import LoraConfig
from torchtitan_rl.launch.interfaces import free_port
from torchtitan_rl.token_sets import kept_bits, kept_runs
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.config import OptimizerConfig, TrainerConfig
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.types import Episode

if TYPE_CHECKING:
    from torchtitan_rl.backends.titan.trainer import PolicyTrainer

ROW_LEN = 48
MAX_STEPS = 4
TIMEOUT_S = 600.0  # of ranks
CONFIG = TrainerConfig(
    max_episode_tokens=ROW_LEN,
    max_tokens_per_microbatch=2 * ROW_LEN,
    threads=1,
    optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2, decay_steps=1),
)


def random_batch(
    *,
    vocab_size: int = 288,
    seed: int = 0,
    num_episodes: int = 9,
    temperature: float = 0.7,
    cuts_tokens: bool = False,
) -> TrainingBatch:
    """Several episodes a row, of four groups; about two thirds of the tokens are sampled, near -5
    nats each."""
    rng = np.random.default_rng(seed)
    episodes = []
    for index, length in enumerate(rng.integers(5, 30, num_episodes)):
        mask = [i >= 3 and i % 7 != 0 for i in range(length)]
        logprobs = rng.normal(-5.0, 1.0, length)
        advantages = rng.normal(0.0, 1.0, length)
        token_ids = tuple(rng.integers(0, vocab_size, length).tolist())
        kept = [random_set(rng, token, vocab_size) for token in token_ids if cuts_tokens]
        episodes.append(
            Episode(
                rollout_id=f"rollout-{index}",
                group_id=f"group-{index % 4}",
                token_ids=token_ids,
                loss_mask=tuple(mask),
                logprobs=tuple(
                    float(v) if on else 0.0 for v, on in zip(logprobs, mask, strict=True)
                ),
                advantages=tuple(
                    float(v) if on else 0.0 for v, on in zip(advantages, mask, strict=True)
                ),
                versions=tuple(0 if on else -1 for on in mask),
                kept_tokens=kept_runs(kept),
            )
        )
    batch = pack_episodes(episodes, row_len=ROW_LEN, temperature=temperature).batch
    assert batch is not None
    return batch


@contextmanager
def trainer(
    checkpoint: Path,
    *,
    max_steps: int = MAX_STEPS,
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    lora: LoraConfig | None = None,
    teachers: Sequence[Path] = (),
    **fields: Any,
) -> Iterator[PolicyTrainer]:
    from torchtitan_rl.backends.titan.trainer import PolicyTrainer

    config = dataclasses.replace(CONFIG, **fields)
    policy_trainer = PolicyTrainer(
        checkpoint,
        config,
        seed=0,
        max_steps=max_steps,
        dtype=dtype,
        lora=lora,
        teachers=teachers,
    )
    try:
        yield policy_trainer
    finally:
        policy_trainer.close()


def run_ranks(function: Callable[..., None], num_ranks: int, *args: Any) -> None:
    """Run ``function(rank, *args)`` in processes of its own, with torchrun's variables but for
    MASTER_PORT; ends them all when one fails or time is up. They are forks of one process that has
    imported the trainer, which takes 8 s of CPU time."""
    # Set by scenarios of engines, which tests import for their constants.
    os.environ.pop("TORCH_COMPILE_DISABLE", None)
    multiprocessing.set_forkserver_preload(
        ["tests.real.models", "torchtitan_rl.backends.titan.trainer"]
    )
    context = torch.multiprocessing.start_processes(
        _with_environment,
        (function, num_ranks, args),
        nprocs=num_ranks,
        join=False,
        start_method="forkserver",
    )
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{function.__name__} on {num_ranks} ranks: {TIMEOUT_S} s")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _with_environment(
    rank: int, function: Callable[..., None], num_ranks: int, args: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1"
    )
    function(rank, *args)


def free_ports(count: int) -> list[int]:
    """Different ones, which no process gets that asks for any port."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def hf_packed_logprobs(checkpoint: Path, batch: TrainingBatch) -> np.ndarray:
    """[N]: each episode on its own through `transformers` in float32; 0 on first tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    result = np.zeros(batch.num_tokens, dtype=np.float32)
    for start, length in zip(batch.episode_starts, batch.episode_lengths, strict=True):
        tokens = torch.from_numpy(batch.token_ids[start : start + length])
        with torch.no_grad():
            logits = model(tokens[None]).logits[0] / batch.temperature
        for index in range(1, length):
            if batch.kept is not None and (number := batch.kept[start + index]) >= 0:
                bits = kept_bits([batch.kept_sets[number]], logits.shape[1])[0]
                kept = np.unpackbits(bits, count=logits.shape[1], bitorder="little")
                logits[index - 1, torch.from_numpy(kept == 0)] = -torch.inf
        chosen = logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
        result[start + 1 : start + length] = chosen.numpy()
    return result
