"""Sums whose own harness asks for a summary, and goes on from it in a new history."""

from __future__ import annotations

import httpx
import verifiers.v1 as vf
from sums_v1 import SumData, SumsConfig, SumTask
from sums_v1 import SumsTaskset as _Sums

__all__ = ["CompactingHarness", "CompactingTaskset"]


class CompactingTaskset(_Sums, vf.Taskset[SumTask, SumsConfig]):
    pass


class CompactingHarness(vf.Harness[vf.HarnessConfig]):
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
        data: SumData,
    ) -> vf.ProgramResult:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}) as http:

            async def ask(*messages: dict[str, str]) -> dict[str, str]:
                body = {"model": ctx.model, "messages": messages}
                answer = await http.post(f"{endpoint}/chat/completions", json=body, timeout=60)
                message: dict[str, str] = answer.json()["choices"][0]["message"]
                return message

            question = {"role": "user", "content": str(data.prompt)}
            thought = await ask(question)
            more = {"role": "user", "content": "Summarize."}
            summary = await ask(question, thought, more)
            await ask({"role": "user", "content": f"{data.prompt} {summary['content']}"})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
