"""A verifiers harness that runs conversations in the worker's own process: prompts, answers, tools.

verifiers' own chat program starts a process for each rollout, which ``uv`` installs over the
network. This harness is a plug-in of verifiers, which finds it by the name of this module.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]

_ROLLOUT_IS_OVER = "session_closed"  # the endpoint's code once a limit of the rollout is reached


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the model until it answers without a tool call."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
        tool_interception_url: str | None = None,
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with AsyncExitStack() as stack:
            headers = {"Authorization": f"Bearer {secret}"}
            http = await stack.enter_async_context(
                httpx.AsyncClient(headers=headers, timeout=None, verify=False)
            )
            timeout = self.config.tool_timeout
            servers = {name: {"url": url, "timeout": timeout} for name, url in mcp_urls.items()}
            tools, *connections = await connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
            while (message := await _ask(http, endpoint, body)) is not None:
                messages.append(message)
                calls = message.get("tool_calls", [])
                for call in calls:
                    refusal = await _refusal(http, tool_interception_url, call)
                    messages.append(refusal or await _tool_message(call, *connections))
                if not calls:
                    break
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _ask(
    http: httpx.AsyncClient, endpoint: str, body: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Ask the model for its next message; None once the rollout is at a limit. RuntimeError: the
    request failed, or verifiers stopped the rollout."""
    answer = await http.post(f"{endpoint}/chat/completions", json=body)
    if answer.status_code != httpx.codes.OK:
        if _ROLLOUT_IS_OVER in answer.text:
            return None
        raise RuntimeError(f"HTTP {answer.status_code}: {answer.text[:1000]}")
    message = answer.json()["choices"][0]["message"]
    return {name: value for name, value in message.items() if value is not None}


async def _refusal(
    http: httpx.AsyncClient, gate_url: str | None, call: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the message with which the task's hooks replace a tool call; None if the call may run.
    RuntimeError: the hooks stopped the rollout."""
    if gate_url is None:
        return None
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    asked = {"tool_call_id": call["id"], "name": name, "arguments": _parsed(arguments)}
    answer = (await http.post(gate_url, json=asked)).raise_for_status().json()
    if answer["action"] == "stop":
        raise RuntimeError(answer["reason"])
    refusal: dict[str, Any] | None = answer["message"] if answer["action"] == "deny" else None
    return refusal


async def _tool_message(
    call: Mapping[str, Any], dispatch: Mapping[str, Any], servers: Mapping[str, Any]
) -> dict[str, Any]:
    name = call["function"]["name"]
    arguments = _parsed(call["function"]["arguments"])
    content: Any
    if name not in dispatch:
        content = f"error: there is no tool {name!r}"
    elif not isinstance(arguments, dict):
        content = "error: the arguments are not a JSON object"
    else:
        content = await call_mcp(servers, dispatch, name, arguments)
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


def _parsed(arguments: str) -> Any:
    """The arguments for the task's hooks: parsed JSON, or the text itself if it is not JSON."""
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
