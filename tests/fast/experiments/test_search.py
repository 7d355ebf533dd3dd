"""Search: worlds, tool, environment, and what the embedded policy is taught."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest

from torchtitan_rl import ToolEnv
from torchtitan_rl.configs import search_tiny
from torchtitan_rl.experiments.search.env import (
    SearchIndex,
    SearchTools,
    index_of,
    is_right,
    make_problem,
    score,
)
from torchtitan_rl.experiments.search.task import SearchTask
from torchtitan_rl.experiments.search.warm_start import Mistakes, build_tokenizer, conversation
from torchtitan_rl.rollout.env import Terminal
from torchtitan_rl.rollout.message_env import MessageTokenEnv
from torchtitan_rl.rollout.rendering import make_renderer
from torchtitan_rl.types import Completion, FinishReason, Problem, VersionRun

pytest.importorskip("bm25s")
CONFIG = search_tiny.config


def problem(index: int, split: Any = "train") -> Problem:
    return make_problem(split, index, num_worlds=8, two_searches=0.5)


def call(query: Any, name: str = "search") -> dict[str, Any]:
    function = {"name": name, "arguments": {"query": query}}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


def test_a_query_finds_the_documents_with_most_of_its_rarest_words() -> None:
    index = SearchIndex(["red wine", "red bread", "white wine", "a red, red rose"])
    assert index.find("white WINE!", 2) == ["white wine", "red wine"]
    assert index.find("bread", 5) == ["red bread"]
    assert [index.find(query, 2) for query in ("", "a", "cheese", "?")] == [[]] * 4


def env_of(data: Any) -> ToolEnv:
    async def search(query: str) -> list[str]:
        return index_of(data["world"]).find(query, 1)

    return ToolEnv(
        [{"role": "user", "content": data["question"]}],
        SearchTools(search),
        partial(score, answer=data["answer"]),
    )


def test_calls_are_answered_and_a_message_without_one_is_the_answer() -> None:
    data = problem(0).data

    async def scenario() -> Terminal:
        env = env_of(data)
        first = await env.reset()
        assert first.messages[0]["content"] == data["question"]
        assert first.tools[0]["function"]["name"] == "search"
        found = await env.step(call(data["person"]))
        assert found.messages[0]["content"].startswith(data["person"])
        both = call("zzz")["tool_calls"] + call(3)["tool_calls"] + call("a", "open")["tool_calls"]
        wrong = await env.step({"tool_calls": both, "invalid_tool_calls": ["{"]})
        assert [one["content"] for one in wrong.messages] == [
            "nothing found",
            "error: the arguments must be one query",
            "error: there is no tool open",
            "error: not a call with a name and arguments in JSON: {",
        ]
        return await env.step({"content": f"It is {data['answer']}."})

    terminal = asyncio.run(scenario())
    assert terminal.reward == 1.0
    assert terminal.metrics["tool_calls"] == 5
    assert terminal.metrics["failed_tool_calls"] == 3


@pytest.mark.parametrize("text", ["", ".", "lace wine", "It is wine, not lace or"])
def test_an_answer_is_right_only_at_the_end(text: str) -> None:
    assert not is_right(text, "lace")


def test_what_the_policy_is_taught_is_what_the_environment_understands_in_one_episode() -> None:
    """Each prompt extends the last one, and the embedded tokenizer has a token for each word."""
    tokenizer = build_tokenizer()
    renderer = make_renderer(tokenizer, kind="qwen3", thinking="keep")
    most = CONFIG.rollout.max_total_tokens
    for number in range(40):
        data = problem(number).data
        turns = conversation(data, Mistakes(), random.Random(number))

        async def follow(data: Any, turns: Any) -> Terminal:
            env = MessageTokenEnv(env_of(data), renderer)
            answer: Any = await env.reset()
            for _, said in turns:
                spoken = (*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id)
                assert len(spoken) <= CONFIG.rollout.sampling.max_tokens_per_turn
                before = answer.prompt_token_ids + spoken
                assert len(before) <= most
                completion = Completion(
                    request_id="r",
                    token_ids=spoken,
                    logprobs=(0.0,) * len(spoken),
                    version_runs=(VersionRun(0, 0),),
                    finish_reason=FinishReason.STOP,
                )
                answer = await env.step(completion)
                if isinstance(answer, Terminal):
                    return answer
                assert answer.prompt_token_ids[: len(before)] == before
            raise AssertionError("no end")

        assert asyncio.run(follow(data, turns)).reward == 1.0


def test_wrong_fields_are_named() -> None:
    found = SearchTask(two_searches=2.0, num_results=0, num_worlds=0).errors()
    assert [error.partition("=")[0] for error in found] == [
        "task.two_searches",
        "task.num_results",
        "task.num_worlds",
    ]
