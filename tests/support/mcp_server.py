"""A small MCP server: ``python -m tests.support.mcp_server [PORT]`` (HTTP), or standard streams."""

from __future__ import annotations

import asyncio
import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from torchtitan_rl.experiments.calculator_agent.calculator import (
    CalculatorError,
    as_text,
    calculate,
)

server = MCPServer("tests", log_level="ERROR")
_notes: list[str] = []


@server.tool()
def calculator(expression: str) -> str:
    """arithmetic"""
    try:
        return as_text(calculate(expression))
    except CalculatorError as error:
        raise ToolError(str(error)) from error


@server.tool()
def note(text: str) -> str:
    """Keeps a text for this session. Returns all texts."""
    _notes.append(text)
    return ", ".join(_notes)


@server.tool()
def wait(seconds: float) -> str:
    """Answers late."""
    time.sleep(seconds)
    return "waited"


@server.tool()
async def pause(seconds: float) -> str:
    """Answers late, and others meanwhile."""
    await asyncio.sleep(seconds)
    return "paused"


@server.tool()
def repeat(text: str, times: int) -> str:
    """Makes long answers."""
    return text * times


@server.tool()
def crash() -> str:
    """Ends the server."""
    print("out of cheese", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
