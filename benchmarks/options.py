"""Options of benchmarks. Their errors are reported before anything is measured."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_RECORD = "options.json"


def at_least(smallest: int) -> Callable[[str], int]:
    """The type of an option: a whole number of at least ``smallest``."""

    def number(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{value} is less than {smallest}")
        return value

    return number


def core(text: str) -> int:
    """The type of an option: a core that this process may run on."""
    number, cores = int(text), sorted(os.sched_getaffinity(0))
    if number not in cores:
        raise argparse.ArgumentTypeError(f"core {number} is none of this process ({cores})")
    return number


def keep_options(folder: Path, options: Mapping[str, Any]) -> None:
    """Make ``folder`` for runs with ``options``, or require that its runs have the same options.

    Raises:
        SystemExit: ``folder`` has runs with different options, or with unknown ones.
    """
    record = folder / _RECORD
    given = {name: str(value) for name, value in options.items()}
    if not record.exists():
        if folder.exists() and any(folder.iterdir()):
            raise SystemExit(
                f"{folder} has files but no {_RECORD}, which would say how its runs were made: "
                "name another --output-dir"
            )
        folder.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(given, indent=1) + "\n")
        return
    kept = json.loads(record.read_text())
    others = [
        f"--{name.replace('_', '-')} {kept[name]} instead of {value}"
        for name, value in given.items()
        if kept.get(name, value) != value
    ]
    if others:
        raise SystemExit(
            f"the runs in {folder} were made with {', '.join(others)}: give the same options, or "
            "name another --output-dir"
        )
