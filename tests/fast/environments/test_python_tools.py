"""The tool ``python``: what a policy reads of its programs, and a conversation with it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from tests.support.async_tests import on_event_loop
from torchtitan_rl import (
    Problem,
    PythonTask,
    PythonTools,
    RolloutConfig,
    SandboxConfig,
    SandboxLimits,
    make_renderer,
)
from torchtitan_rl.experiments.calculator_agent.task import POLICY_DIR
from torchtitan_rl.types import Completion, FinishReason, VersionRun

LIMITED = SandboxConfig(
    isolation="limits", limits=SandboxLimits(wall_s=60, cpu_s=0.2, output_bytes=200)
)
IMPATIENT = replace(LIMITED, limits=SandboxLimits(wall_s=0.3))
# Arguments -> what the policy reads, and whether that counts as a failure.
CALLS = [
    ({"code": "print(1)\n6 * 7"}, "1\n42", False),
    ({"code": "x = 1"}, "(no output)", False),
    (
        {"code": "print(1)\n1 / 0"},
        '1\nTraceback (most recent call last):\n  File "snippet.py", line 2, in <module>\n'
        "    1 / 0\n    ~~^~~\nZeroDivisionError: division by zero",
        True,
    ),
    ({"code": "while True: pass"}, "error: stopped after 0.2 s of CPU time", True),
    (
        {"code": "print('x' * 300)"},
        "x" * 200 + "\n(only the first 200 bytes of the output)",
        False,
    ),
    ({"code": "import ctypes; ctypes.string_at(0)"}, "error: killed by signal 11", True),
    ({}, "error: python needs the argument code, a text", True),
    ({"code": 3}, "error: python needs the argument code, a text", True),
]


def test_a_policy_reads_what_its_programs_print() -> None:
    async def all_calls() -> None:
        tools = PythonTools(LIMITED)
        assert [schema["function"]["name"] for schema in await tools.open()] == ["python"]
        for arguments, text, failed in CALLS:
            answer = await tools.call("python", arguments)
            assert (answer.text, answer.failed) == (text, failed)
        answer = await PythonTools(IMPATIENT).call("python", {"code": "import time; time.sleep(9)"})
        assert (answer.text, answer.failed) == ("error: stopped after 0.3 s", True)
        answer = await tools.call("bash", {"code": "ls"})
        assert (answer.text, answer.failed) == ("error: no tool 'bash'; there is python", True)

    asyncio.run(all_calls())


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(POLICY_DIR)


@on_event_loop
async def test_a_question_of_a_data_file_is_answered_after_a_call(tokenizer):
    options = {"compare": "number", "renderer": "qwen3", "thinking": "keep"}
    task = PythonTask(train=("unused.jsonl",), sandbox=LIMITED, **options)
    messages = [{"role": "user", "content": "What is 6 * 7?"}]
    problem = Problem(problem_id="1", data={"messages": messages, "answer": "42"})
    env = task.environment(problem, tokenizer=tokenizer, limits=RolloutConfig())
    first = await env.reset()
    assert '"name": "python"' in tokenizer.decode(first.prompt_token_ids)
    call = json.dumps({"name": "python", "arguments": {"code": "6 * 7"}})
    spoken = said(tokenizer, f"<tool_call>\n{call}\n</tool_call>")
    second = await env.step(spoken)
    prompt = second.prompt_token_ids
    assert prompt[: len(first.prompt_token_ids) + len(spoken.token_ids)] == (
        first.prompt_token_ids + spoken.token_ids
    )
    assert "<tool_response>\n42\n</tool_response>" in tokenizer.decode(prompt)
    end = await env.step(said(tokenizer, "It is 42."))
    assert end.reward == 1.0
    assert end.metrics["tool_calls"] == 1.0


def said(tokenizer, text: str) -> Completion:
    renderer = make_renderer(tokenizer, kind="qwen3", thinking="keep")
    ids = (*tokenizer.encode(text, add_special_tokens=False), renderer.stop_token_ids[0])
    return Completion(
        request_id="1",
        token_ids=ids,
        logprobs=(0.0,) * len(ids),
        version_runs=(VersionRun(start=0, version=0),),
        finish_reason=FinishReason.STOP,
    )
