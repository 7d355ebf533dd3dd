"""Tools of real MCP servers, a process on standard streams and one on HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.servers import ROOT, served
from torchtitan_rl.commands import cli
from torchtitan_rl.environments.mcp import McpServer, McpServerError, McpTools
from torchtitan_rl.environments.question import ToolAnswer

pytest.importorskip("mcp")

COMMAND = (sys.executable, "-m", "tests.support.mcp_server")
STDIO = McpServer(command=COMMAND, env={"PYTHONPATH": ROOT}, start_timeout_s=120)


@pytest.fixture(scope="module")
def http() -> Iterator[McpServer]:
    with served("tests.support.mcp_server") as port:
        yield McpServer(url=f"http://127.0.0.1:{port}/mcp", headers={"X-Token": "$HOME"})


def with_tools(
    servers: Mapping[str, McpServer], use: Callable[[McpTools], Awaitable[None]]
) -> list[str]:
    """Opens, uses and closes the tools. Returns their names; no process is left."""

    async def session() -> list[str]:
        tools = McpTools(servers)
        try:
            schemas = await tools.open()
            await use(tools)
        finally:
            await tools.close()
        return [schema["function"]["name"] for schema in schemas]

    names = asyncio.run(session())
    assert not own_servers()
    return names


def own_servers() -> list[psutil.Process]:
    """Servers on standard streams that this process started."""
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child.cmdline()[1:] == list(COMMAND[1:])  # not of the shim before it
    ]


async def calls_that_go_well_and_wrong(tools: McpTools) -> None:
    async def call(name: str, **arguments: Any) -> ToolAnswer:
        return await tools.call(name, arguments)

    assert await call("calculator", expression="2 + 3") == ToolAnswer(text="5")
    refused = await call("calculator", expression="x")
    assert refused.failed
    assert refused.text.startswith("error: ")
    assert "only numbers, + - " in refused.text
    assert "Field required" in (await call("calculator")).text
    assert (await call("nothing")).text.startswith("error: no tool 'nothing'; there are calculator")
    together = await asyncio.gather(*(call("calculator", expression=f"{n}*2") for n in range(20)))
    assert [answer.text for answer in together] == [str(2 * n) for n in range(20)]
    long = await call("repeat", text="ab", times=3000)
    assert long.text == "ab" * 2000 + "... (2000 characters more)"
    late = await call("wait", seconds=30)
    assert late == ToolAnswer(text="error: no answer after 1 s", failed=True)


def test_calls_over_standard_streams() -> None:
    server = McpServer(**{**vars(STDIO), "call_timeout_s": 1.0})
    names = with_tools({"own": server}, calls_that_go_well_and_wrong)
    assert names == ["calculator", "note", "wait", "pause", "repeat", "crash"]


def test_calls_over_http(http: McpServer) -> None:
    server = McpServer(**{**vars(http), "call_timeout_s": 1.0})
    with_tools({"far": server}, calls_that_go_well_and_wrong)


def test_each_rollout_has_a_session_unless_it_is_shared_and_a_lost_one_is_replaced() -> None:
    async def notes_of(server: McpServer, *texts: str) -> str:
        """Of two rollouts after another."""
        for text in texts:
            tools = McpTools({"s": server})
            await tools.open()
            answer = await tools.call("note", {"text": text})
            await tools.close()
        return answer.text

    async def both() -> None:
        assert await notes_of(STDIO, "a", "b") == "b"
        shared = McpServer(**{**vars(STDIO), "shared": True})
        assert await notes_of(shared, "a", "b") == "a, b"
        assert len(own_servers()) == 1
        tools = McpTools({"s": shared})
        await tools.open()
        with pytest.raises(McpServerError, match=r"^MCP server s \(.*its last words: out of chee"):
            await tools.call("crash", {})
        assert await notes_of(shared, "c") == "c"

    asyncio.run(both())
    assert not own_servers()


def test_calls_of_one_message_run_at_once_or_in_their_order(http: McpServer) -> None:
    async def answers(tools: McpTools) -> list[str]:
        """Of a slow call and of a quick one."""
        ended: list[str] = []

        async def call(name: str, **arguments: Any) -> None:
            await tools.call(name, arguments)
            ended.append(name)

        await asyncio.gather(call("pause", seconds=0.3), call("note", text="a"))
        return ended

    async def at_once(tools: McpTools) -> None:
        assert await answers(tools) == ["note", "pause"]

    async def in_order(tools: McpTools) -> None:
        assert await answers(tools) == ["pause", "note"]

    with_tools({"s": http}, at_once)
    with_tools({"s": McpServer(**{**vars(http), "in_order": True})}, in_order)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": ("/no/such",)}, "MCP server s (/no/such): FileNotFoundError: "),
        (
            {"command": (sys.executable, "-c", "import no_such")},
            "Connection closed; its last words: ModuleNotFoundError: No module named 'no_such'",
        ),
        ({"command": ("false",)}, "MCP server s (false): MCPError: Connection closed"),
        (
            {"command": ("sleep", "600"), "start_timeout_s": 0.1},
            "MCP server s (sleep 600): no list of tools after 0.1 s",
        ),
        (
            {"command": (), "url": "http://127.0.0.1:9/mcp"},
            "MCP server s (http://127.0.0.1:9/mcp): ConnectError: ",
        ),
        ({"tools": ("add",)}, "it has no tool 'add'; it has calculator, note"),
    ],
)
def test_a_server_that_cannot_be_used_is_one_error(changes: Any, message: str) -> None:
    async def nothing(tools: McpTools) -> None:
        raise AssertionError

    with pytest.raises(McpServerError) as caught:
        with_tools({"s": McpServer(**{**vars(STDIO), **changes})}, nothing)
    assert message in str(caught.value)


def test_tools_of_the_same_name_are_refused_and_can_be_chosen(http: McpServer) -> None:
    async def nothing(tools: McpTools) -> None:
        return

    with pytest.raises(McpServerError, match="MCP server b: another server has a tool calculator"):
        with_tools({"a": http, "b": http}, nothing)
    some = {
        "a": McpServer(**{**vars(http), "tools": ("calculator",)}),
        "b": McpServer(**{**vars(http), "tools": ("note", "wait")}),
    }
    assert with_tools(some, nothing) == ["calculator", "note", "wait"]


PARENT = """
import asyncio, sys
from torchtitan_rl import McpServer, McpTools

async def main():
    await McpTools({"deaf": McpServer(command=tuple(sys.argv[1:]), start_timeout_s=600)}).open()

asyncio.run(main())
"""


def test_servers_that_ignore_their_input_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    deaf = f"sleep 1000 & echo $$ $! > {pids}; exec sleep 1000"
    command = [sys.executable, "-c", PARENT, "sh", "-c", deaf]
    with subprocess.Popen(command, cwd=ROOT) as parent:
        try:
            wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
            servers = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
        finally:
            parent.kill()
    gone, alive = psutil.wait_procs(servers, timeout=60)
    assert (len(gone), alive) == (2, [])


CONFIG = """
from torchtitan_rl import McpServer, McpTask, MixtureTask, PolicyConfig, RunConfig

command = ("sh", "-c", "echo started >> {folder}/starts; exec {python} -m {module}")
servers = {{"s": McpServer(command=command, env={{"PYTHONPATH": {root!r}}}, start_timeout_s=59)}}
config = RunConfig(
    policy=PolicyConfig(checkpoint="package:calculator_agent"),
    task=MixtureTask(
        tasks={{"one": McpTask(train=("{folder}/rows.jsonl",), renderer="qwen3", servers=servers)}}
    ),
)
"""


def test_a_preview_starts_one_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "".join(f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(8))
    (tmp_path / "rows.jsonl").write_text(rows)
    config = tmp_path / "config.py"
    config.write_text(
        CONFIG.format(folder=tmp_path, python=sys.executable, module=COMMAND[-1], root=ROOT)
    )
    assert cli.main(["data", "preview", str(config), "--count", "3", "--all"]) == 0
    assert capsys.readouterr().out.count('"name": "calculator"') == 3
    assert (tmp_path / "starts").read_text() == "started\n"
    assert not own_servers()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_so()
