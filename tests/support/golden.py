"""Comparison with a text that was kept when somebody last looked at it: `check_golden`."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


def check_golden(name: str, text: str, *, replaced: dict[str, str] | None = None) -> None:
    """``text`` must be what ``tests/golden/NAME`` has; with UPDATE_GOLDEN=1 it is written there.

    ``replaced``: what depends on the machine or the test's folder, and what stands for it.
    """
    # Where a line with a path breaks depends on where the checkout is.
    text = re.sub(r"\s+\(default:\s*(/[^()]*)\)", _default_path, text)
    for found, stand_in in {**(replaced or {}), str(ROOT): "ROOT"}.items():
        text = text.replace(found, stand_in)
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.relative_to(ROOT)}; UPDATE_GOLDEN=1 writes it anew"


def _default_path(found: re.Match[str]) -> str:
    return f" (default: {''.join(found[1].split())})"
