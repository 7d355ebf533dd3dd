"""The agents of docs/agent_libraries.md, as a reader would copy them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "agent_libraries.md"
HEADING_AND_BLOCK = re.compile(r"^## (.+?)\n.*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def documented_examples() -> dict[str, str]:
    """From each library's heading to its program; the page's first block belongs to all."""
    (_, shared), *examples = HEADING_AND_BLOCK.findall(PAGE.read_text())
    return {heading: f"{shared}\n\n{block}" for heading, block in examples}


def documented_agents() -> dict[str, Callable[..., Any]]:
    """The ``solve`` of each example."""
    agents = {}
    for heading, program in documented_examples().items():
        namespace: dict[str, Any] = {}
        exec(compile(program, f"{PAGE.name}: {heading}", "exec"), namespace)
        agents[heading] = namespace["solve"]
    return agents
