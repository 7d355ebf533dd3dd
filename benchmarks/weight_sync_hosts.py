"""Measures weight syncs from a trainer to several hosts: one copy for each host, tree, shards.

    python -m benchmarks.weight_sync_hosts [--policy 135M | DIR] [--hosts 1 2 4] [--repeats 5]
        [--parts hosts publish]

Hosts are workers on loopback addresses of this machine, each with a fetching process and two
readers (replicas without an engine). All hosts share the cores of this machine, so several hosts at
once take longer than separate machines would. A tree saves the trainer's network traffic, which
gains nothing here.

- hosts: one trainer rank publishes, and the readers of all hosts ask for the version at once. This
  measures the bytes that each host reads, and the seconds until the last reader has the version:
  once with all hosts reading from the trainer (star), and once with a tree. For comparison, one
  process reads the same bytes into existing memory without checksums, and the same number of bytes
  is copied over a TCP connection.
- publish: two FSDP ranks that each offer their shards, compared with rank 0 gathering and offering
  all weights.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torchtitan_rl.backends.monarch  # noqa: F401  (before Monarch)

# isort: split
from monarch.actor import enable_transport

from benchmarks.options import at_least
from benchmarks.plots import bars
from benchmarks.report import heading, medians, print_table, write_report
from benchmarks.weight_sync import POLICIES
from benchmarks.weight_sync_copies import TcpCopy
from benchmarks.weight_sync_hosts_parts import Publisher, Setting, worker_hosts
from torchtitan_rl.backends.monarch.runtime import supervise
from torchtitan_rl.config.model import resolve_checkpoint
from torchtitan_rl.launch.interfaces import free_port


def main() -> None:
    options = _options()
    report = heading(options)
    work_dir = Path(tempfile.mkdtemp(prefix="weight-sync-hosts-"))
    supervise()
    enable_transport(f"tcp://127.0.0.1:{free_port()}")
    try:
        results = asyncio.run(_measure(options, work_dir))
    finally:
        shutil.rmtree(work_dir)
    bars(
        options.output.with_suffix(".png"),
        _seconds(results),
        title="Weights from a trainer to other hosts",
        label="seconds (medians)",
    )
    write_report(options.output, report | results)


async def _measure(options: argparse.Namespace, work_dir: Path) -> dict[str, Any]:
    policy = str(resolve_checkpoint(POLICIES.get(options.policy, options.policy)))
    base = Setting(policy=policy, threads=options.threads)
    results: dict[str, Any] = {}
    if "hosts" in options.parts:
        results["hosts"] = [
            await _to_hosts(base, number, options.repeats, work_dir) for number in options.hosts
        ]
        _print_hosts(results["hosts"])
    if "publish" in options.parts:
        setting = dataclasses.replace(base, ranks=2)
        results["publish"] = await _shards_against_gather(setting, options.repeats, work_dir)
        _print_publish(results["publish"])
    return results


async def _to_hosts(setting: Setting, number: int, repeats: int, work_dir: Path) -> dict[str, Any]:
    """Measure repeats of star, tree, plain read and TCP copy, one after another."""
    async with (
        worker_hosts(number, work_dir) as hosts,
        Publisher.spawn(setting, work_dir) as publisher,
    ):
        tcp: TcpCopy | None = None
        rows: list[dict[str, Any]] = []
        for repeat in range(repeats + 1):  # the first repeat is not counted
            row: dict[str, Any] = {}
            for name, fan_out in (("star", 0), ("tree", 1)):
                published = await publisher.publish("bfloat16")
                reached = await hosts.reach(published.handle, fan_out=fan_out)
                row |= {f"{name}_s": reached.seconds, f"{name}_fetch_s": reached.slowest_fetch_s}
                row[f"{name}_bytes"] = list(reached.num_bytes)
            tcp = tcp or TcpCopy(published.handle.num_bytes, readers=1)
            row |= {"read_s": await hosts.read(published.handle), "tcp_copy_s": tcp.run()}
            if repeat:
                rows.append(row)
        assert tcp is not None
        tcp.close()
    typical = medians(rows)
    return {
        "hosts": number,
        "readers": 2 * number,
        "num_bytes": published.handle.num_bytes,
        "bytes_of_each_host": rows[-1]["star_bytes"],
        "repeats": rows,
        "medians": typical,
        "ratios": {
            "star / tree": typical["star_s"] / typical["tree_s"],
            "fetch rate / TCP copy": typical["tcp_copy_s"] / typical["star_fetch_s"],
            "read rate / TCP copy": typical["tcp_copy_s"] / typical["read_s"],
        },
    }


async def _shards_against_gather(setting: Setting, repeats: int, work_dir: Path) -> dict[str, Any]:
    """Measure publishing, and fetching to one host: alternately with shards and with gathering."""
    async with (
        worker_hosts(1, work_dir) as hosts,
        Publisher.spawn(setting, work_dir) as publisher,
    ):
        rows = []
        for repeat in range(repeats + 1):
            row: dict[str, float] = {}
            for name in ("shards", "gather"):
                published = await publisher.publish("bfloat16", gathers=name == "gather")
                reached = await hosts.reach(published.handle, fan_out=0)
                row[f"{name}_publish_s"] = published.seconds
                row[f"{name}_fetch_s"] = reached.slowest_fetch_s
                row[f"{name}_s"] = published.seconds + reached.seconds
            if repeat:
                rows.append(row)
    typical = medians(rows)
    names = ("publish_s", "fetch_s", "s")
    return {
        "ranks": setting.ranks,
        "repeats": rows,
        "medians": typical,
        "ratios": {
            f"gather / shards, {n}": typical[f"gather_{n}"] / typical[f"shards_{n}"] for n in names
        },
    }


def _seconds(results: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in the picture."""
    shown = {
        f"{one['hosts']} hosts, {name}": one["medians"][f"{name}_s"]
        for one in results.get("hosts", ())
        for name in ("star", "tree")
    }
    if "publish" in results:
        for name in ("shards", "gather"):
            seconds = results["publish"]["medians"][f"{name}_publish_s"]
            shown[f"2 ranks, publish by {name}"] = seconds
    return shown


def _print_hosts(results: Sequence[Mapping[str, Any]]) -> None:
    print("\none copy for each host: seconds (medians)")
    columns = ("star_s", "tree_s", "star_fetch_s", "tree_fetch_s", "read_s", "tcp_copy_s")
    names = ("star", "tree", "a fetch", "in the tree", "read", "TCP", "read/TCP", "fetch/TCP")
    print_table(
        ["hosts", "MB", "MB of each host", *names],
        [
            [
                str(one["hosts"]),
                f"{one['num_bytes'] / 1e6:.1f}",
                ", ".join(f"{n / 1e6:.1f}" for n in one["bytes_of_each_host"]),
                *(f"{one['medians'][column]:.3f}" for column in columns),
                f"{one['ratios']['read rate / TCP copy']:.2f}",
                f"{one['ratios']['fetch rate / TCP copy']:.2f}",
            ]
            for one in results
        ],
    )


def _print_publish(result: Mapping[str, Any]) -> None:
    print("\ntwo FSDP ranks: seconds (medians)")
    print_table(
        ["", "publish", "fetch", "both"],
        [
            [
                name,
                *(
                    f"{result['medians'][f'{name}_{part}']:.3f}"
                    for part in ("publish_s", "fetch_s", "s")
                ),
            ]
            for name in ("shards", "gather")
        ],
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policy", default="135M", metavar="NAME_OR_DIR")
    parser.add_argument("--hosts", nargs="+", type=at_least(1), default=[1, 2, 4])
    parts = ["hosts", "publish"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--threads", type=int, default=1, help="of each trainer rank")
    parser.add_argument("--repeats", type=at_least(1), default=5)
    default = Path("outputs/benchmarks/weight_sync_hosts.json")
    parser.add_argument("--output", type=Path, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
