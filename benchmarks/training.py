"""Tokens per second of an optimizer step: packed episodes against a bare torchtitan loop.

    python -m benchmarks.training [--episodes 128] [--row-len 1024] [--repeats 5] [--policy DIR]

Sides, alternating (each repeat begins with another one), on the same episodes (log-normal lengths,
two thirds of the tokens trained):

- ours: `PolicyTrainer.train_step` on packed rows: policy loss, metrics, divergence check;
- bare: forward, cross entropy, backward, clipping and AdamW of the same torchtitan model, on the
  same rows, with the same attention inside documents and logits of the same tokens;
- bare, all logits: the same, with the logits of every token, as pretraining computes them;
- padded: `PolicyTrainer.train_step` with one row for each episode.

Tokens per second exclude padding. Memory is the peak of the process above what it holds before the
step (CPU: resident pages; CUDA: allocated). On CUDA the table also has the share of the device's
peak FLOP/s, from torchtitan's table, that `training_work.step_flops` amounts to.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.plots import bars
from benchmarks.report import machine, print_table, write_report
from benchmarks.training_work import (
    draw_episodes,
    one_row_each,
    pack,
    padding_shares,
    step_flops,
)
from torchtitan_rl.backends.titan.trainer import PolicyTrainer
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.config import TrainerConfig
from torchtitan_rl.training.splitting import microbatches, trained_mask

PADDING_SIZES = (16, 64, 128, 512, 1024, 2048)
PADDING_DRAWS = 20


def main() -> None:
    options = _options()
    facts = machine()
    rng = np.random.default_rng(0)
    episodes = draw_episodes(rng, options.episodes, options.row_len, options.vocab_size)
    packed, padded = pack(episodes, options.row_len), one_row_each(episodes, options.row_len)
    config = TrainerConfig(
        row_len=options.row_len, rows_per_microbatch=options.rows, threads=options.threads
    )
    trainer = PolicyTrainer(options.policy, config, seed=0, max_steps=1000)
    bare = BareLoop(options.policy, config)

    def ours(batch: TrainingBatch) -> int:
        return int(trainer.train_step(batch).metrics["trained_tokens"])

    sides: dict[str, Callable[[], int]] = {
        "ours": lambda: ours(packed),
        "bare": lambda: bare.step(packed, all_logits=False),
        "bare, all logits": lambda: bare.step(packed, all_logits=True),
        "padded": lambda: ours(padded),
    }
    measured = measure(sides, repeats=options.repeats)
    flops = bare.flops([len(episode.token_ids) for episode in episodes], packed)
    report(options, facts, packed, measured, flops=flops)
    trainer.close()


class BareLoop:
    """What a user of torchtitan writes to train on rows: no policy loss, no metrics, no checks."""

    def __init__(self, policy: Path, config: TrainerConfig) -> None:
        from torchtitan_rl.backends.titan import setup as titan_setup
        from torchtitan_rl.backends.titan.hf import load_hf
        from torchtitan_rl.backends.titan.model import build_policy
        from torchtitan_rl.backends.titan.optim import PolicyOptimizer
        from torchtitan_rl.config.hf_model import read_architecture

        layout = titan_setup.set_up(config)
        dtype = "float32" if layout.device.type == "cpu" else "bfloat16"
        self._device = layout.device
        self._rows = config.rows_per_microbatch
        self._architecture = read_architecture(policy)
        self._model = build_policy(self._architecture, config, layout, dtype=dtype)
        load_hf(self._model, policy)
        self._optimizer = PolicyOptimizer(self._model, config.optimizer, max_steps=1000)

    def step(self, batch: TrainingBatch, *, all_logits: bool) -> int:
        """One optimizer step; returns how many tokens it was trained on."""
        mask = trained_mask(batch)
        num_trained = int(mask.sum())
        for part in microbatches(replace(batch, loss_mask=mask), self._rows):
            tokens_BL = torch.from_numpy(part.token_ids).to(self._device)
            positions_BL = torch.from_numpy(part.position_ids).to(self._device)
            wanted_S = torch.from_numpy(part.loss_mask).to(self._device).flatten().nonzero()[:, 0]
            before_S = (wanted_S - 1).clamp_min(0)
            every_S = torch.arange(tokens_BL.numel(), device=self._device)
            masks = self._model.get_attention_masks(positions_BL)
            selected_S = every_S if all_logits else before_S
            logits_SV = self._model(tokens_BL, positions_BL, masks, selected_S)[0]
            if all_logits:
                logits_SV = logits_SV[before_S]
            targets_S = tokens_BL.flatten()[wanted_S]
            loss = torch.nn.functional.cross_entropy(logits_SV.float(), targets_S, reduction="sum")
            (loss / num_trained).backward()
        self._optimizer.clip()
        self._optimizer.step()
        return num_trained

    def flops(self, lengths: Sequence[int], batch: TrainingBatch) -> float:
        """Of a step on episodes of these lengths, with the logits of trained tokens."""
        sizes = self._architecture
        return step_flops(
            lengths,
            int(trained_mask(batch).sum()),
            num_layer_parameters=sum(p.numel() for p in self._model.layers.parameters()),
            num_head_parameters=sizes.vocab_size * sizes.dim,
            attention_width=sizes.num_layers * sizes.num_heads * sizes.head_dim,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """``memory_bytes``: the largest of all repeats. ``trained_tokens``: of each repeat."""

    seconds: tuple[float, ...]
    trained_tokens: int
    memory_bytes: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure(sides: Mapping[str, Callable[[], int]], *, repeats: int) -> dict[str, Measured]:
    """Each side once per repeat, in turns; one unmeasured round first.

    Raises:
        SystemExit: two steps were not trained on equally many tokens.
    """
    names = list(sides)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    memory: dict[str, int] = dict.fromkeys(names, 0)
    trained: set[int] = set()
    for number in range(repeats + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            before = _start_memory_peak()
            started = time.perf_counter()
            trained.add(sides[name]())
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - started
            if number > 0:
                seconds[name].append(elapsed)
                memory[name] = max(memory[name], _memory_peak() - before)
    if len(trained) > 1:
        raise SystemExit(f"the sides were trained on {sorted(trained)} tokens, not equally many")
    return {
        name: Measured(
            seconds=tuple(seconds[name]), trained_tokens=max(trained), memory_bytes=memory[name]
        )
        for name in names
    }


def report(
    options: argparse.Namespace,
    facts: Mapping[str, Any],
    packed: TrainingBatch,
    measured: Mapping[str, Measured],
    *,
    flops: float,
) -> None:
    tokens, peak, ours = packed.num_tokens, _peak_flops(), measured["ours"]
    sides = {
        name: {
            "seconds": side.seconds,
            "median_s": side.median_s,
            "tokens": tokens,
            "trained_tokens": side.trained_tokens,
            "tokens_per_second": tokens / side.median_s,
            "peak_memory_bytes": side.memory_bytes,
            "mfu": flops / side.median_s / peak if peak else None,
        }
        for name, side in measured.items()
    }
    ratios = {name: _median_ratio(side.seconds, ours.seconds) for name, side in measured.items()}
    padding = {
        size: padding_shares(size, options.row_len, draws=PADDING_DRAWS) for size in PADDING_SIZES
    }
    print(
        f"{packed.num_episodes} episodes, {tokens} tokens, {len(packed.token_ids)} rows of "
        f"{options.row_len}, padding {packed.padding_share:.1%}"
    )
    print_table(
        ["side", "s/step", "tokens/s", "ours / it", "peak MiB", "MFU"],
        [
            [
                name,
                f"{side['median_s']:.2f}",
                f"{side['tokens_per_second']:,.0f}",
                f"{ratios[name]:.3f}",
                f"{side['peak_memory_bytes'] / 2**20:,.0f}",
                "-" if side["mfu"] is None else f"{side['mfu']:.1%}",
            ]
            for name, side in sides.items()
        ],
    )
    print_table(
        ["episodes a step", "padding", "at most"],
        [
            [f"{size:,}", f"{statistics.median(shares):.1%}", f"{max(shares):.1%}"]
            for size, shares in padding.items()
        ],
    )
    bars(
        options.output.with_suffix(".png"),
        {name: side["tokens_per_second"] for name, side in sides.items()},
        title=f"Optimizer step, {packed.num_episodes} episodes in rows of {options.row_len}",
        label="tokens/s",
    )
    write_report(
        options.output,
        {
            "machine": facts,
            "options": {name: str(value) for name, value in vars(options).items()},
            "padding_share": packed.padding_share,
            "padding_by_episodes": {str(size): shares for size, shares in padding.items()},
            "flops": flops,
            "sides": sides,
            "ratios": {f"ours / {name}": ratio for name, ratio in ratios.items()},
        },
    )


def _median_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """How many times as fast ours is, of each repeat."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


def _start_memory_peak() -> int:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is held now
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
    if not torch.cuda.is_available():
        return None
    from torchtitan.tools.utils import get_peak_flops

    return float(get_peak_flops(torch.cuda.get_device_name()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", type=Path, default=POLICY_DIR)
    parser.add_argument("--vocab-size", type=int, default=256, help="token ids are drawn below it")
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--row-len", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=4, help="rows of a microbatch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/training.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
