"""Seconds of an optimizer step: with shared prefixes, with unshared rows, and the least possible.

    python -m benchmarks.training [--row-lens 512 1024 2048] [--repeats 5] [--policy DIR]
    python -m benchmarks.training --device cuda --shape qwen3-0.6b --row-lens 2048

The sides are measured alternately (each repeat begins with another side), on the same episodes of
each workload of `training_work`:

- shared, rows of N: `PolicyTrainer.train_step`: policy loss, metrics, divergence check;
- unshared: `PolicyTrainer.train_step` with ``trainer.share_prefixes`` off;
- ideal: a bare torchtitan loop (forward, cross entropy, backward, clipping, AdamW) on the distinct
  tokens alone, with the same number of logits. Its rows are as long as the longest episode, and
  have torchtitan's plain causal attention. The step would cost this if sharing and our loss cost
  nothing;
- bare: the bare loop on the tokens of all episodes, to compare with unshared rows.

A microbatch has at most ``--rows`` times the row length tokens. The sides unshared, ideal and bare
have the shortest rows. A ratio is the median of the repeats' ratios of a side's seconds to the
seconds of the shared step in the shortest rows. Memory is the peak of the process minus the memory
before the step (CPU: resident pages; CUDA: allocated). With one thread, CPU seconds hardly change
with other work on the machine. On CUDA the FLOPs of `PolicySizes.step_flops` per second are printed
as a share of the device's peak, if it is known.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import at_least
from benchmarks.plots import bars
from benchmarks.report import machine, print_table, write_report
from benchmarks.training_bare import BareLoop
from benchmarks.training_work import WORKLOADS, fitting
from torchtitan_rl.backends.titan.flops import num_logits, num_visible_pairs, peak_flops
from torchtitan_rl.backends.titan.trainer import PolicyTrainer
from torchtitan_rl.config.plan import KEEPS_MEMORY
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.training.batch import TrainingBatch, trained_mask
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.training.packing import Share, rank_share

SHAPES = {
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "micro": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
}


def main() -> None:
    options = _options()
    if options.device == "cpu" and not KEEPS_MEMORY.items() <= os.environ.items():
        # A trainer's process starts with these variables, too. The C library reads them before
        # Python starts.
        command = [sys.executable, "-m", "benchmarks.training", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | KEEPS_MEMORY)
    facts = machine()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: there is no CUDA device")
    if options.device == "cpu" and torch.cuda.is_available():
        raise SystemExit("--device cpu: hide the CUDA devices (CUDA_VISIBLE_DEVICES=)")
    batches = fitting(
        options.workloads or WORKLOADS, vocab_size=options.vocab_size, row_lens=options.row_lens
    )
    with tempfile.TemporaryDirectory() as folder:
        policy = options.policy
        if options.shape is not None:
            policy = random_policy(Path(folder), **SHAPES[options.shape])
        results = {name: _compare(batch, policy, options) for name, batch in batches.items()}
    _report(options, facts, results)


def _compare(batch: TrainingBatch, policy: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all sides of one workload, in rows into which its episodes fit."""
    longest = int(batch.episode_lengths.max())
    row_lens = sorted(row_len for row_len in options.row_lens if row_len >= longest)
    row_len = row_lens[0]
    trainers = {
        **{
            f"shared, rows of {size}": _trainer(policy, size, options, on=True) for size in row_lens
        },
        "unshared": _trainer(policy, row_len, options, on=False),
    }
    bare = BareLoop(policy, _config(row_len, options, on=True))
    shares = {on: _share(batch, row_len, options.rows, on=on) for on in (True, False)}
    logits = {on: num_logits(share.parts) for on, share in shares.items()}

    def ours(trainer: PolicyTrainer) -> Callable[[], None]:
        return lambda: (trainer.train_step(batch), None)[1]

    def plain(on: bool) -> Callable[[], None]:
        return lambda: bare.step(
            num_tokens=shares[on].num_computed,
            num_logits=logits[on],
            row_len=longest,
            max_tokens=row_len * options.rows,
        )

    measured = measure(
        {
            **{side: ours(trainer) for side, trainer in trainers.items()},
            "ideal": plain(True),
            "bare": plain(False),
        },
        repeats=options.repeats,
    )
    for trainer in trainers.values():
        trainer.close()
    flops = bare.sizes.step_flops(
        num_tokens=shares[True].num_computed,
        num_logits=logits[True],
        num_pairs=num_visible_pairs(shares[True].parts),
    )
    return {
        "episodes": batch.num_episodes,
        "tokens": batch.num_tokens,
        "trained_tokens": int(trained_mask(batch).sum()),
        "computed_tokens": shares[True].num_computed,
        "unshared_tokens": shares[False].num_computed,
        **_summary(measured, shared=f"shared, rows of {row_len}", flops=flops),
    }


def _trainer(policy: Path, row_len: int, options: argparse.Namespace, *, on: bool) -> PolicyTrainer:
    return PolicyTrainer(policy, _config(row_len, options, on=on), seed=0, max_steps=1000)


def _config(row_len: int, options: argparse.Namespace, *, on: bool) -> TrainerConfig:
    return TrainerConfig(
        max_episode_tokens=row_len,
        max_tokens_per_microbatch=row_len * options.rows,
        threads=options.threads,
        share_prefixes=on,
    )


def _share(batch: TrainingBatch, row_len: int, rows: int, *, on: bool) -> Share:
    return rank_share(
        batch,
        trained_mask(batch),
        max_tokens=row_len * rows,
        padding_multiple=1,
        share_prefixes=on,
        rank=0,
        num_ranks=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The results of one side. ``cpu_seconds``: CPU time of all threads. ``memory_bytes``: the
    largest value of all repeats."""

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    memory_bytes: int


def measure(sides: Mapping[str, Callable[[], None]], *, repeats: int) -> dict[str, Measured]:
    """Measure each side once in each repeat. A first round is not counted."""
    names = list(sides)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    memory: dict[str, int] = dict.fromkeys(names, 0)
    for number in range(repeats + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            before = _start_memory_peak()
            started = time.perf_counter(), time.process_time()
            sides[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - started[0], time.process_time() - started[1]
            if number > 0:
                seconds[name].append(elapsed)
                memory[name] = max(memory[name], _memory_peak() - before)
    return {
        name: Measured(
            seconds=tuple(wall for wall, _ in seconds[name]),
            cpu_seconds=tuple(cpu for _, cpu in seconds[name]),
            memory_bytes=memory[name],
        )
        for name in names
    }


def _summary(measured: Mapping[str, Measured], *, shared: str, flops: float) -> dict[str, Any]:
    """``ratios``: the seconds of each side divided by those of the side ``shared``."""
    peak = _peak_flops()
    sides, to = measured.items(), measured[shared]
    return {
        "seconds": {name: side.seconds for name, side in sides},
        "cpu_seconds": {name: side.cpu_seconds for name, side in sides},
        "median_s": {name: statistics.median(side.seconds) for name, side in sides},
        "median_cpu_s": {name: statistics.median(side.cpu_seconds) for name, side in sides},
        "peak_memory_bytes": {name: side.memory_bytes for name, side in sides},
        "ratios": {name: _median_ratio(side.seconds, to.seconds) for name, side in sides},
        "cpu_ratios": {
            name: _median_ratio(side.cpu_seconds, to.cpu_seconds) for name, side in sides
        },
        "flops": flops,
        "mfu": flops / statistics.median(to.seconds) / peak if peak else None,
    }


def _report(
    options: argparse.Namespace,
    facts: Mapping[str, Any],
    results: Mapping[str, Mapping[str, Any]],
) -> None:
    for name, result in results.items():
        print(f"{name}: {result['tokens']:,} tokens, {result['computed_tokens']:,} computed")
        print_table(
            ["side", "s", "CPU s", "x shared", "x shared, CPU", "peak MiB"],
            [
                [
                    side,
                    *(f"{result[column][side]:.3f}" for column in ("median_s", "median_cpu_s")),
                    *(f"{result[column][side]:.2f}" for column in ("ratios", "cpu_ratios")),
                    f"{result['peak_memory_bytes'][side] / 2**20:,.0f}",
                ]
                for side in result["median_s"]
            ],
        )
        if result["mfu"] is not None:
            print(f"{result['mfu']:.1%} of the peak FLOP/s")
    bars(
        options.output.with_suffix(".png"),
        {name: result["ratios"]["unshared"] for name, result in results.items()},
        title="Optimizer step with shared prefixes",
        label="times as fast as unshared rows",
    )
    write_report(
        options.output,
        {
            "machine": facts,
            "options": {name: str(value) for name, value in vars(options).items()},
            "workloads": results,
        },
    )


def _median_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """The median over the repeats of ``theirs / ours``: how many times as fast ours is."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def _start_memory_peak() -> int:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at the current value
    return _status_bytes("VmRSS")


def _memory_peak() -> int:
    return (
        torch.cuda.max_memory_allocated() if torch.cuda.is_available() else _status_bytes("VmHWM")
    )


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise LookupError(f"/proc/self/status has no {name}")


def _peak_flops() -> float | None:
    return peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def random_policy(path: Path, **shape: Any) -> Path:
    """Write a Qwen3 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape)).to(torch.bfloat16).save_pretrained(path)
    return path


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--policy", type=Path, default=POLICY_DIR)
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights instead")
    parser.add_argument("--vocab-size", type=int, default=256, help="token ids are drawn below it")
    parser.add_argument("--workloads", nargs="*", choices=sorted(WORKLOADS), metavar="NAME")
    parser.add_argument("--row-lens", type=at_least(1), nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--rows", type=int, default=8, help="rows of a microbatch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=at_least(1), default=5)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/training.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
