"""Python's garbage collector in processes that import much and create many short-lived objects."""

from __future__ import annotations

import gc

_NEW_OBJECTS = 10_000  # between two collections; Python's default is 700


def collect_less() -> None:
    """Never scan again what is alive now, imports above all, and collect less often. In the
    controller, collections took 30 % of the CPU time of its Python code."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)
