from __future__ import annotations

import asyncio
import json
from math import prod
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from torchtitan_rl.config.checks.machine import MachineFacts
from torchtitan_rl.config.checks.run import find_errors
from torchtitan_rl.config.hf_model import read_policy_facts
from torchtitan_rl.configs.calculator_agent_tiny import config
from torchtitan_rl.experiments.calculator_agent.agent import SYSTEM_PROMPT
from torchtitan_rl.experiments.calculator_agent.stories import NAMES, THINGS, TWO_OPERATIONS
from torchtitan_rl.experiments.calculator_agent.task import POLICY_DIR, CalculatorAgentTask
from torchtitan_rl.experiments.calculator_agent.token_audit import (
    AuditedEnv,
    TokenIdTransport,
    TurnTokens,
    count_mismatches,
)
from torchtitan_rl.experiments.calculator_agent.tokenizer import (
    CHAT_TEMPLATE,
    answer_text,
    build_backend,
)
from torchtitan_rl.rollout.env import Terminal
from torchtitan_rl.types import Completion, FinishReason, RolloutStatus, Turn, VersionRun

LAPTOP = MachineFacts(num_cores=2, memory_bytes=16 << 30)
TURNS = st.lists(
    st.tuples(st.tuples(st.integers(0, 2)), st.tuples(st.integers(0, 2))).map(
        lambda pair: TurnTokens(*pair)
    ),
    max_size=4,
)


# The embedded policy and its configuration.


def test_the_embedded_policy_has_less_than_a_million_bfloat16_parameters() -> None:
    with (POLICY_DIR / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    assert 5e5 <= sum(prod(entry["shape"]) for entry in header.values()) <= 1e6
    assert sum(path.stat().st_size for path in POLICY_DIR.iterdir()) <= 2 << 20


def test_the_embedded_tokenizer_and_template_are_those_that_the_code_builds() -> None:
    shipped = Tokenizer.from_file(str(POLICY_DIR / "tokenizer.json"))
    one, other = json.loads(shipped.to_str()), json.loads(build_backend().to_str())
    for part in ("model", "pre_tokenizer", "added_tokens", "normalizer"):
        assert one[part] == other[part]
    assert read_policy_facts(POLICY_DIR).vocab_size == shipped.get_vocab_size()
    assert (POLICY_DIR / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_the_ready_configuration_has_no_errors() -> None:
    errors = find_errors(config, read_policy_facts(POLICY_DIR), LAPTOP)
    assert [message for message in errors if not message.startswith("name is")] == []


def test_a_right_conversation_fits_into_the_budgets_of_the_ready_run() -> None:
    def count(text: str) -> int:
        return len(build_backend().encode(text).ids)

    numbers = {"a": 99, "b": 99, "c": 12}
    story = max(
        (
            story.text.format(name=NAMES[0], other=NAMES[1], things=THINGS[0], **numbers)
            for story in TWO_OPERATIONS
        ),
        key=count,
    )
    call = (
        '<tool_call>{"name": "calculator", "arguments": {"expression": "(99+99)*12"}}</tool_call>'
    )
    tool = "calculator(expression): arithmetic"
    opening = f"<|im_start|>system\n{SYSTEM_PROMPT}\n{tool}<|im_end|>\n<|im_start|>user\n{story}"
    response = "<|im_end|>\n<|im_start|>user\n<tool_response>99999</tool_response><|im_end|>\n"
    assert count(call) < config.rollout.sampling.max_tokens_per_turn
    assert count(answer_text(99999)) < config.rollout.sampling.max_tokens_per_turn
    generation = 2 * count("<|im_start|>assistant\n")
    total = count(opening) + count(call + response) + generation + count(answer_text(99999))
    assert total < config.rollout.max_total_tokens / 1.5


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"two_operations": 1.5}, "task.two_operations=1.5"),
        ({"max_number": 3}, "task.max_number=3"),
        ({"max_turns": 0}, "task.max_turns=0"),
        ({"replayable": True}, "task.replayable is True"),
        ({"num_train_problems": 0}, "task.num_train_problems=0"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, Any], named: str) -> None:
    (message,) = CalculatorAgentTask(**wrong).errors()
    assert message.startswith(named)


# The comparison of tokens.


def test_equal_turns_have_no_mismatch_and_each_other_turn_is_one() -> None:
    one, two = TurnTokens((1,), (2,)), TurnTokens((1, 2), (3,))
    assert count_mismatches([one, two], [one, two]) == 0
    assert count_mismatches([one, two], [one]) == 1
    assert count_mismatches([], [one, two]) == 2
    assert count_mismatches([one, two], [two, one]) == 2
    assert count_mismatches([one], [TurnTokens((1,), (3,))]) == 1
    assert count_mismatches([one], [TurnTokens((3,), (2,))]) == 1


@given(TURNS, TURNS)
def test_only_equal_turns_have_no_mismatch(
    recorded: list[TurnTokens], sent: list[TurnTokens]
) -> None:
    assert (count_mismatches(recorded, sent) == 0) == (recorded == sent)


def test_the_transport_asks_for_token_ids_and_keeps_them_of_what_came_back() -> None:
    asked: list[dict[str, Any]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        assert int(request.headers["content-length"]) == len(request.content)
        assert request.headers["authorization"] == "Bearer k"
        if len(asked) == 1:
            return httpx.Response(400, json={"error": {"message": "no"}})
        choice = {"index": 0, "token_ids": [3, 4]}
        return httpx.Response(200, json={"prompt_token_ids": [1, 2], "choices": [choice]})

    async def main() -> tuple[list[int], list[TurnTokens]]:
        transport = TokenIdTransport(httpx.MockTransport(serve))
        headers = {"authorization": "Bearer k"}
        async with httpx.AsyncClient(transport=transport, headers=headers) as client:
            answers = [await client.post("http://x", json={"n": 1}) for _ in range(2)]
        assert answers[1].json()["choices"][0]["token_ids"] == [3, 4]
        return [answer.status_code for answer in answers], transport.turns

    assert asyncio.run(main()) == ([400, 200], [TurnTokens((1, 2), (3, 4))])
    assert asked == [{"n": 1, "return_token_ids": True}] * 2


class EndedEnv:
    """Ends at once."""

    async def run(self, turns: Any) -> Terminal:
        return Terminal(reward=0.5, metrics={"calls": 1.0})

    async def finish(self, status: RolloutStatus) -> Terminal:
        return Terminal(reward=0.0)

    async def close(self) -> None: ...


def turn(prompt: tuple[int, ...], *token_ids: int, is_seen: bool = True) -> Turn:
    completion = Completion(
        request_id="r",
        token_ids=token_ids,
        logprobs=(0.0,) * len(token_ids),
        version_runs=(VersionRun(0, 0),),
        finish_reason=FinishReason.STOP,
    )
    return Turn(prompt_token_ids=prompt, completion=completion, is_seen=is_seen)


def audited(
    sent: list[TurnTokens], *, second_is_seen: bool = True, is_finished: bool = False
) -> Terminal:
    """The end of a rollout of two turns, (1,) -> (2,) and (1, 2, 3) -> (4,)."""
    tree: Any = SimpleNamespace(turns=(turn((1,), 2), turn((1, 2, 3), 4, is_seen=second_is_seen)))

    async def main() -> Terminal:
        env = AuditedEnv(EndedEnv(), sent)
        ended = await env.run(tree)
        return await env.finish(RolloutStatus.MAX_TURNS) if is_finished else ended

    return asyncio.run(main())


FIRST, SECOND = TurnTokens((1,), (2,)), TurnTokens((1, 2, 3), (4,))


@pytest.mark.parametrize(
    ("sent", "mismatches"),
    [
        ([FIRST, SECOND], 0),
        ([FIRST, TurnTokens((1, 2, 3), (5,))], 1),
        ([FIRST, TurnTokens((1, 2), (4,))], 1),
        ([FIRST], 1),
    ],
)
def test_the_metrics_of_a_rollout_count_the_turns_that_differ(
    sent: list[TurnTokens], mismatches: int
) -> None:
    end = audited(sent)
    assert end.reward == 0.5
    assert end.metrics == {
        "calls": 1.0,
        "agent/compared_turns": 2.0,
        "agent/token_mismatches": mismatches,
    }


def test_a_turn_that_the_agent_never_saw_is_not_compared() -> None:
    end = audited([FIRST], second_is_seen=False)
    assert end.metrics["agent/compared_turns"] == 1.0
    assert end.metrics["agent/token_mismatches"] == 0.0


def test_a_rollout_that_a_limit_ended_is_compared_too() -> None:
    metrics = audited([FIRST, FIRST], is_finished=True).metrics
    assert metrics == {"agent/compared_turns": 2.0, "agent/token_mismatches": 1.0}
