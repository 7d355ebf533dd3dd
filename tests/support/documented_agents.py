"""The agents of docs/agent_libraries.md, as a reader would copy them."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "agent_libraries.md"
HEADING_AND_BLOCK = re.compile(r"^## (.+?)\n.*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def documented_examples() -> dict[str, str]:
    """From each library's name to its program; the page's first block belongs to all."""
    (_, shared), *examples = HEADING_AND_BLOCK.findall(PAGE.read_text())
    return {f"docs: {heading}": f"{shared}\n\n{block}" for heading, block in examples}


def documented_agents() -> dict[str, Callable[..., Any]]:
    """The ``solve`` of each example."""
    agents = {}
    for heading, program in documented_examples().items():
        file = f"<{heading}>"
        linecache.cache[file] = (len(program), None, program.splitlines(True), file)  # for inspect
        namespace: dict[str, Any] = {}
        exec(compile(program, file, "exec"), namespace)
        agents[heading] = namespace["solve"]
    return agents
