"""The names of all metrics, read from `docs/metrics.md`, which is linked into the package.

A name without a row on that page cannot be recorded. A name with braces stands for several. One
that ends in ``/*`` is a family: its members depend on a task or a cause.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from functools import cache
from itertools import product
from pathlib import Path

_TABLE = Path(__file__).with_name("metrics.md")
_ROW = re.compile(r"^\| `(.+?)` \|", re.MULTILINE)


class Split(StrEnum):
    """Whose rollouts a metric describes; part of the name."""

    TRAIN = "train"
    EVALUATION = "evaluation"


@cache
def metric_names() -> frozenset[str]:
    """Every name and family of the table."""
    rows = _ROW.findall(_TABLE.read_text(encoding="utf-8"))
    return frozenset(name for row in rows for name in _expand(row))


def is_known(name: str) -> bool:
    """Whether ``name`` is in the table, or of one of its families."""
    if name in metric_names():
        return not name.endswith("/*")
    families = (one.removesuffix("*") for one in metric_names() if one.endswith("/*"))
    return any(name.startswith(family) and name != family for family in families)


def check_names(names: Iterable[str]) -> None:
    """
    Raises:
        ValueError: a name is not in the table.
    """
    unknown = sorted(name for name in names if not is_known(name))
    if unknown:
        raise ValueError(f"unknown metrics {unknown}: add them to docs/metrics.md")


def _expand(row: str) -> Iterable[str]:
    """
    >>> list(_expand("{train,evaluation}/reward_{mean,max}"))
    ['train/reward_mean', 'train/reward_max', 'evaluation/reward_mean', 'evaluation/reward_max']
    """
    parts = re.split(r"\{(.+?)\}", row)  # every second one was in braces
    choices = [part.split(",") if index % 2 else [part] for index, part in enumerate(parts)]
    return map("".join, product(*choices))
