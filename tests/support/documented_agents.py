"""The agents of docs/agent_libraries.md, as a reader would copy them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "agent_libraries.md"


def documented_agents() -> dict[str, Callable[..., Any]]:
    """From each heading to its ``solve``; the page's first block belongs to every example."""
    sections = re.findall(r"^## (.+?)$(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    blocks = {
        name: re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) for name, text in sections
    }
    (shared, *_), *examples = [found for found in blocks.values() if found]
    names = [name for name, found in blocks.items() if found][1:]
    agents = {}
    for name, (block, *_) in zip(names, examples, strict=True):
        namespace: dict[str, Any] = {}
        exec(compile(shared + block, f"{PAGE.name}: {name}", "exec"), namespace)
        agents[name] = namespace["solve"]
    return agents
