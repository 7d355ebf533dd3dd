"""Tokens per second of an optimizer step: packed episodes against a bare torchtitan loop.

    python -m benchmarks.training [--episodes 128] [--row-len 1024] [--repeats 5] [--policy DIR]

Sides, one after another in each repeat, on the same episodes (log-normal lengths, two thirds of
the tokens trained):

- ours: `PolicyTrainer.train_step` on packed rows: policy loss, metrics, divergence check;
- bare: forward, cross entropy, backward, clipping and AdamW of the same torchtitan model, on the
  same rows, with the same attention inside documents and logits of the same tokens;
- bare, all logits: likewise, with the logits of every token, as pretraining computes them;
- padded: `PolicyTrainer.train_step` with a row for each episode.

Tokens are those that are not padding. Memory: peak of the process above what it holds before the
step (CPU: resident pages; CUDA: allocated). On CUDA the table also has the share of the device's
peak FLOP/s, by torchtitan's table, counting 6 FLOPs a parameter and token (Kaplan et al. 2020).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.plots import bars
from benchmarks.report import machine, print_table, write_report
from experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.adapters.policy_trainer import PolicyTrainer
from torchtitan_rl.config import TrainerConfig
from torchtitan_rl.training.batch import TrainingBatch
from torchtitan_rl.training.packing import pack_episodes
from torchtitan_rl.training.splitting import microbatches, trained_mask
from torchtitan_rl.types import Episode

MEDIAN_LENGTH, SIGMA = 148, 0.7
PADDING_SIZES = (16, 64, 128, 512, 2048)


def main() -> None:
    options = _options()
    rng = np.random.default_rng(0)
    vocab_size = options.vocab_size
    episodes = draw_episodes(rng, options.episodes, options.row_len, vocab_size)
    packed = _pack(episodes, options.row_len)
    config = TrainerConfig(
        row_len=options.row_len, rows_per_microbatch=options.rows, threads=options.threads
    )
    trainer = PolicyTrainer(options.policy, config, seed=0, max_steps=1000)
    bare = BareLoop(options.policy, config)
    sides: dict[str, Callable[[], Any]] = {
        "ours": lambda: trainer.train_step(packed),
        "bare": lambda: bare.step(packed, all_logits=False),
        "bare, all logits": lambda: bare.step(packed, all_logits=True),
        "padded": lambda: trainer.train_step(one_row_each(episodes, options.row_len)),
    }
    measured = measure(sides, repeats=options.repeats)
    padding = {
        str(size): _pack(
            draw_episodes(rng, size, options.row_len, vocab_size), options.row_len
        ).padding_share
        for size in PADDING_SIZES
    }
    report(options, packed, measured, padding, num_parameters=bare.num_parameters)
    trainer.close()


def draw_episodes(
    rng: np.random.Generator, count: int, row_len: int, vocab_size: int
) -> list[Episode]:
    """Episodes of log-normal lengths, 8 to ``row_len`` tokens."""
    lengths = np.exp(rng.normal(np.log(MEDIAN_LENGTH), SIGMA, count)).astype(int)
    episodes = []
    for index, length in enumerate(lengths.clip(8, row_len).tolist()):
        mask = tuple(i >= length // 3 for i in range(length))
        episodes.append(
            Episode(
                rollout_id=f"g/r{index}",
                group_id="g",
                token_ids=tuple(rng.integers(0, vocab_size, length).tolist()),
                loss_mask=mask,
                logprobs=tuple(-5.0 if on else 0.0 for on in mask),
                advantages=tuple(float(index % 2) - 0.5 if on else 0.0 for on in mask),
                versions=tuple(0 if on else -1 for on in mask),
            )
        )
    return episodes


def one_row_each(episodes: list[Episode], row_len: int) -> TrainingBatch:
    """The batch without packing: a row for each episode, the rest of it padding."""
    rows = [_pack([episode], row_len) for episode in episodes]
    names = (
        "token_ids",
        "position_ids",
        "document_ids",
        "loss_mask",
        "logprobs",
        "advantages",
        "versions",
    )
    fields: dict[str, Any] = {
        name: np.concatenate([getattr(row, name) for row in rows]) for name in names
    }
    return replace(rows[0], num_episodes=len(rows), **fields)


class BareLoop:
    """What a user of torchtitan writes to train on rows: no policy loss, no metrics, no checks."""

    def __init__(self, policy: Path, config: TrainerConfig) -> None:
        from torchtitan_rl.adapters import titan_setup
        from torchtitan_rl.adapters.hf_config import read_architecture
        from torchtitan_rl.adapters.titan_hf import load_hf
        from torchtitan_rl.adapters.titan_model import build_policy
        from torchtitan_rl.adapters.titan_optim import PolicyOptimizer

        layout = titan_setup.set_up(config)
        dtype = "float32" if layout.device.type == "cpu" else "bfloat16"
        self._device = layout.device
        self._rows = config.rows_per_microbatch
        self._model = build_policy(read_architecture(policy), config, layout, dtype=dtype)
        load_hf(self._model, policy)
        self._optimizer = PolicyOptimizer(self._model, config.optimizer, max_steps=1000)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._model.parameters())

    def step(self, batch: TrainingBatch, *, all_logits: bool) -> None:
        mask = trained_mask(batch)
        num_trained = int(mask.sum())
        for part in microbatches(replace(batch, loss_mask=mask), self._rows):
            tokens_BL = torch.from_numpy(part.token_ids).to(self._device)
            positions_BL = torch.from_numpy(part.position_ids).to(self._device)
            wanted_S = torch.from_numpy(part.loss_mask).to(self._device).flatten().nonzero()[:, 0]
            read_S = torch.arange(tokens_BL.numel(), device=self._device)
            selected_S = read_S if all_logits else (wanted_S - 1).clamp_min(0)
            masks = self._model.get_attention_masks(positions_BL)
            logits_SV = self._model(tokens_BL, positions_BL, masks, selected_S)[0]
            if all_logits:
                logits_SV = logits_SV[(wanted_S - 1).clamp_min(0)]
            targets_S = tokens_BL.flatten()[wanted_S]
            loss = torch.nn.functional.cross_entropy(logits_SV.float(), targets_S, reduction="sum")
            (loss / num_trained).backward()
        self._optimizer.clip()
        self._optimizer.step()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """``memory_bytes``: the largest of all repeats."""

    seconds: tuple[float, ...]
    memory_bytes: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure(sides: Mapping[str, Callable[[], Any]], *, repeats: int) -> dict[str, Measured]:
    """Each side once per repeat, in turns; one unmeasured round first."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    memory: dict[str, int] = dict.fromkeys(sides, 0)
    for round_number in range(repeats + 1):
        for name, step in sides.items():
            before = _start_memory_peak()
            started = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - started
            if round_number > 0:
                seconds[name].append(elapsed)
                memory[name] = max(memory[name], _memory_peak() - before)
    return {
        name: Measured(seconds=tuple(seconds[name]), memory_bytes=memory[name]) for name in sides
    }


def report(
    options: argparse.Namespace,
    packed: TrainingBatch,
    measured: Mapping[str, Measured],
    padding: Mapping[str, float],
    *,
    num_parameters: int,
) -> None:
    tokens = packed.num_tokens
    peak = _peak_flops()
    speed = {name: tokens / side.median_s for name, side in measured.items()}
    print(
        f"{packed.num_episodes} episodes, {tokens} tokens, {len(packed.token_ids)} rows of "
        f"{options.row_len}, padding {packed.padding_share:.1%}"
    )
    rows = []
    for name, side in measured.items():
        share = f"{6 * num_parameters * speed[name] / peak:.1%}" if peak else "-"
        rows.append(
            [
                name,
                f"{side.median_s:.2f}",
                f"{speed[name]:,.0f}",
                f"{speed['ours'] / speed[name]:.2f}",
                f"{side.memory_bytes / 2**20:,.0f}",
                share,
            ]
        )
    print_table(["side", "s/step", "tokens/s", "ours / it", "peak MiB", "MFU"], rows)
    print_table(
        ["episodes a step", "padding"], [[size, f"{share:.1%}"] for size, share in padding.items()]
    )
    bars(
        options.output.with_suffix(".png"),
        speed,
        title=f"Optimizer step, {packed.num_episodes} episodes in rows of {options.row_len}",
        label="tokens/s",
    )
    write_report(
        options.output,
        {
            "machine": machine(),
            "options": {name: str(value) for name, value in vars(options).items()},
            "tokens": tokens,
            "padding_share": packed.padding_share,
            "padding_by_episodes": dict(padding),
            "sides": {
                name: {
                    "seconds": side.seconds,
                    "median_s": side.median_s,
                    "tokens_per_second": speed[name],
                    "peak_memory_bytes": side.memory_bytes,
                }
                for name, side in measured.items()
            },
            "ratios": {f"ours / {name}": speed["ours"] / speed[name] for name in speed},
        },
    )


def _pack(episodes: list[Episode], row_len: int) -> TrainingBatch:
    batch = pack_episodes(episodes, row_len=row_len, temperature=1.0).batch
    if batch is None:
        raise SystemExit("no episode fits a row")
    return batch


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
