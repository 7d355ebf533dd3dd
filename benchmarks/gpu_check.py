"""What the trainer does on one device: seconds and memory of a step, of a published version, of an
offload and of a checkpoint.

    python -m benchmarks.gpu_check [STAGE ...] [--shape qwen3-0.6b] [--output FILE]

Needs torch and torchtitan, not vLLM. The weights are random. On a CPU the stages run too, with
``--shape micro``, to test the script. Stages:

- steps: the first step (with compilation) and the median of later steps, for each kind of
  activation checkpointing, with and without ``trainer.compile``; tokens and FLOPs per second, peak
  memory;
- small_card: which token counts fit into 21 GiB, the part of a 24 GB card that a sleeping engine
  leaves (CUDA only);
- publish: a version into shared memory and from there into weights on the device, as a replica
  loads it;
- offload: to host memory and back, and the memory that another process can then take (CUDA only);
- checkpoint: the seconds for which the trainer stands still, and until the files are complete;
- mismatch: differences between the trainer's logprobs and those of transformers in bfloat16, on the
  embedded policy: what an engine's different rounding does.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.options import at_least
from benchmarks.report import heading, write_report
from benchmarks.training import SHAPES, random_policy
from benchmarks.training_work import pack, siblings
from torchtitan_rl.backends.monarch.trainer_rank import JointPublisher
from torchtitan_rl.backends.titan.trainer import PolicyTrainer
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.weights.shm import SharedMemoryPublisher, WeightStaging

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
SMALL_CARD_BYTES = 21 << 30
CHECKPOINTING = ("none", "selective", "full")


def steps(options: argparse.Namespace, policy: Path) -> dict[str, Any]:
    results = {}
    for compiled in (False, True) if IS_CUDA else (False,):
        for kind in CHECKPOINTING:
            name = f"{kind}{', compiled' if compiled else ''}"
            fields = {"activation_checkpointing": kind, "compile": compiled}
            with (
                _out_of_memory_is_a_result(results, name),
                _trainer(policy, options, **fields) as trainer,
            ):
                results[name] = _steps(trainer, options)
    return results


def small_card(options: argparse.Namespace, policy: Path) -> dict[str, Any]:
    if not IS_CUDA:
        return {"left out": "there is no CUDA device"}
    torch.cuda.set_per_process_memory_fraction(SMALL_CARD_BYTES / torch.cuda.mem_get_info()[1])
    results: dict[str, Any] = {}
    for kind in CHECKPOINTING:
        for tokens in (2048, 4096, 8192):
            name = f"{tokens} tokens, {kind}"
            fields = {"activation_checkpointing": kind, "max_tokens_per_microbatch": tokens}
            with (
                _out_of_memory_is_a_result(results, name),
                _trainer(policy, options, **fields) as trainer,
            ):
                trainer.train_step(_batch(options))
                results[name] = {"peak_bytes": torch.cuda.max_memory_reserved()}
    torch.cuda.set_per_process_memory_fraction(1.0)
    return results


def publish(options: argparse.Namespace, policy: Path) -> dict[str, Any]:
    with _trainer(policy, options) as trainer, tempfile.TemporaryDirectory() as folder:
        shared = SharedMemoryPublisher("gpu-check", Path(folder))
        publisher, staging = JointPublisher(shared), WeightStaging()
        weights = {name: t.clone() for name, t in trainer.hf_state_dict().items()}
        seconds: dict[str, list[float]] = {"publish": [], "stage": [], "load": []}
        try:
            for version in range(1, options.repeats + 2):
                parts = trainer.hf_parts()
                assert parts is not None
                started = time.perf_counter()
                handle = publisher.publish(version, parts, keep=frozenset())
                assert handle is not None
                seconds["publish"].append(_elapsed(started))
                started = time.perf_counter()
                staging.stage(handle)
                seconds["stage"].append(_elapsed(started))
                started = time.perf_counter()
                for name, tensor in staging.tensors(version).items():
                    weights[name].copy_(tensor)
                seconds["load"].append(_elapsed(started))
                staging.discard_before(version)
        finally:
            shared.close()
        result = {f"{name}_s": _first_and_later(values) for name, values in seconds.items()}
        return {"num_bytes": handle.num_bytes, **result}


def offload(options: argparse.Namespace, policy: Path) -> dict[str, Any]:
    if not IS_CUDA:
        return {"left out": "there is no CUDA device"}
    with _trainer(policy, options) as trainer:
        trainer.train_step(_batch(options))
        seconds: dict[str, list[float]] = {"offload": [], "onload": []}
        for _ in range(options.repeats + 1):
            started = time.perf_counter()
            trainer.offload()
            seconds["offload"].append(_elapsed(started))
            free, total = torch.cuda.mem_get_info()
            started = time.perf_counter()
            trainer.onload()
            seconds["onload"].append(_elapsed(started))
        result = {f"{name}_s": _first_and_later(values) for name, values in seconds.items()}
        return {"free_bytes_offloaded": free, "device_bytes": total, **result}


def checkpoint(options: argparse.Namespace, policy: Path) -> dict[str, Any]:
    with _trainer(policy, options) as trainer, tempfile.TemporaryDirectory() as folder:
        trainer.train_step(_batch(options))
        started = time.perf_counter()
        trainer.save_checkpoint(Path(folder) / "checkpoint", {})
        stands_still_s = _elapsed(started)
        trainer.finish_checkpoint()
        return {"stands_still_s": stands_still_s, "complete_s": _elapsed(started)}


def mismatch(options: argparse.Namespace, policy: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    batch = pack(siblings(np.random.default_rng(0), 256, groups=2, size=4, prompt=100, answer=100))
    model = AutoModelForCausalLM.from_pretrained(POLICY_DIR, dtype=torch.bfloat16).to(DEVICE)
    expected_N = np.zeros(batch.num_tokens, np.float32)
    for start, length in zip(batch.episode_starts, batch.episode_lengths, strict=True):
        ids_1L = torch.from_numpy(batch.token_ids[start : start + length])[None].to(DEVICE)
        with torch.inference_mode():
            logprobs_LV = model(ids_1L).logits[0, :-1].float().log_softmax(-1)
        of_tokens_L = logprobs_LV.gather(1, ids_1L[0, 1:, None])[:, 0]
        expected_N[start + 1 : start + length] = of_tokens_L.cpu().numpy()
    fields = {"max_episode_tokens": 200, "max_tokens_per_microbatch": 2000}
    with _trainer(POLICY_DIR, options, dtype="bfloat16", **fields) as trainer:
        difference_E = np.abs(trainer.logprobs(batch) - expected_N)[expected_N != 0]
    return {
        "mean": float(difference_E.mean()),
        "p99": float(np.quantile(difference_E, 0.99)),
        "max": float(difference_E.max()),
    }


STAGES: dict[str, Callable[[argparse.Namespace, Path], dict[str, Any]]] = {
    stage.__name__: stage for stage in (steps, small_card, publish, offload, checkpoint, mismatch)
}


def main() -> None:
    options = _options()
    report = heading(options)
    if IS_CUDA:
        report["device"] = {
            "name": torch.cuda.get_device_name(),
            "capability": torch.cuda.get_device_capability(),
            "bytes": torch.cuda.mem_get_info()[1],
        }
    report["stages"] = {}
    with tempfile.TemporaryDirectory() as folder:
        policy = random_policy(Path(folder), **SHAPES[options.shape])
        for name in options.stages:
            started = time.perf_counter()
            report["stages"][name] = result = STAGES[name](options, policy)
            print(f"{name} ({_elapsed(started):.0f} s)")
            for key, value in result.items():
                print(f"  {key}: {value}", flush=True)
            write_report(options.output, report)


def _steps(trainer: PolicyTrainer, options: argparse.Namespace) -> dict[str, Any]:
    batch = _batch(options)
    if IS_CUDA:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(options.repeats + 1):
        started = time.perf_counter()
        metrics = trainer.train_step(batch).metrics
        seconds.append(_elapsed(started))
    return {
        "first_s": seconds[0],
        "later_s": statistics.median(seconds[1:]),
        "computed_tokens": metrics["computed_tokens"],
        "flops_per_second": metrics["flops_per_second_per_rank"],
        "mfu": metrics.get("mfu"),
        "peak_bytes": torch.cuda.max_memory_allocated() if IS_CUDA else None,
    }


def _batch(options: argparse.Namespace) -> TrainingBatch:
    vocab_size, size = SHAPES[options.shape]["vocab_size"], options.episode_tokens // 2
    rng = np.random.default_rng(0)
    return pack(siblings(rng, vocab_size, groups=8, size=8, prompt=size, answer=size))


@contextlib.contextmanager
def _trainer(
    policy: Path, options: argparse.Namespace, *, dtype: str | None = None, **fields: Any
) -> Iterator[PolicyTrainer]:
    config = TrainerConfig(
        **{
            "max_episode_tokens": options.episode_tokens,
            "max_tokens_per_microbatch": options.tokens,
            **fields,
        }
    )
    dtype = dtype or ("bfloat16" if IS_CUDA else "float32")
    trainer = PolicyTrainer(policy, config, seed=0, max_steps=1000, dtype=dtype)
    try:
        yield trainer
    finally:
        trainer.close()
        del trainer
        gc.collect()
        if IS_CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def _out_of_memory_is_a_result(results: dict[str, Any], name: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError:
        results[name] = "does not fit"


def _elapsed(started: float) -> float:
    if IS_CUDA:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _first_and_later(seconds: list[float]) -> tuple[float, float]:
    return seconds[0], statistics.median(seconds[1:])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", default=list(STAGES), metavar="STAGE")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--tokens", type=at_least(1), default=8192, help="of a microbatch, at most")
    parser.add_argument("--episode-tokens", type=at_least(2), default=512)
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/gpu_check.json"))
    options = parser.parse_args()
    unknown = [name for name in options.stages if name not in STAGES]
    if unknown:
        parser.error(f"stages {unknown} do not exist; there are {list(STAGES)}")
    return options


if __name__ == "__main__":
    main()
