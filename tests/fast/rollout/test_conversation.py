"""Conversations as episodes: the loss is on exactly the tokens that a policy would sample."""

from __future__ import annotations

from typing import Any

import pytest
from renderers import Qwen3RendererConfig
from renderers.base import build_training_sample
from renderers.qwen3 import Qwen3Renderer

from tests.support.conversations import conversation, tokenizer
from torchtitan_rl.experiments.calculator_agent.agent import CALCULATOR
from torchtitan_rl.experiments.calculator_agent.warm_start import build_tokenizer
from torchtitan_rl.rollout.conversation import conversation_to_episodes
from torchtitan_rl.rollout.rendering import make_renderer

MARKED = (  # ChatML with the marks of `transformers`
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
TURNS = [
    *conversation(1),
    {"role": "user", "content": "More names:\nDora"},
    {"role": "assistant", "content": "Ann\nDora // new"},
    {"role": "user", "content": "Thanks"},
]
CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1+1"}}}
WITH_TOOL: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "a sum"},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "The answer is 2.", "reasoning_content": "2"},
]
THOUGHTS = [
    {"role": "user", "content": "Sort Ann"},
    {"role": "assistant", "content": "Ann", "reasoning_content": "one name"},
    {"role": "user", "content": "Sort Bob"},
    {"role": "assistant", "content": "Bob", "reasoning_content": "one more"},
]


def texts(tokens: Any, episode: Any) -> list[str]:
    """The texts with loss, one for each run of tokens."""
    runs: list[list[int]] = []
    for token, has_loss, before in zip(
        episode.token_ids, episode.loss_mask, (False, *episode.loss_mask), strict=False
    ):
        if has_loss:
            runs[len(runs) :] = [] if before else [[]]
            runs[-1].append(token)
    return [tokens.decode(run) for run in runs]


@pytest.mark.parametrize("kind", ["chatml", "template"])
def test_the_mask_is_the_assistant_mask_of_transformers(kind: Any) -> None:
    tokens = tokenizer()
    (episode,) = conversation_to_episodes("x", TURNS, renderer=make_renderer(tokens, kind=kind))
    theirs = tokens.apply_chat_template(
        TURNS,
        chat_template=MARKED,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    size = len(episode.token_ids)
    assert episode.token_ids == tuple(theirs["input_ids"][:size])
    assert episode.loss_mask == tuple(map(bool, theirs["assistant_masks"][:size]))
    assert not any(theirs["assistant_masks"][size:])
    assert texts(tokens, episode) == ["Bob 1<|im_end|>", "Ann\nDora // new<|im_end|>"]


def test_tool_calls_are_learned_as_the_renderers_library_masks_them() -> None:
    tokens = build_tokenizer()
    renderer = make_renderer(tokens, kind="qwen3", thinking="keep")
    (episode,) = conversation_to_episodes("x", WITH_TOOL, renderer=renderer, tools=[CALCULATOR])
    library = Qwen3Renderer(tokens, Qwen3RendererConfig(thinking_retention="all"))
    theirs = build_training_sample(library, WITH_TOOL, tools=[CALCULATOR])
    size = len(episode.token_ids)
    assert episode.token_ids == tuple(theirs.token_ids[:size])
    assert episode.loss_mask == tuple(theirs.loss_mask[:size])
    assert "<tool_call>" in texts(tokens, episode)[0]


def test_a_prefilled_thought_has_no_loss() -> None:
    tokens = tokenizer()
    renderer = make_renderer(tokens, kind="qwen3", thinking="off")
    (episode,) = conversation_to_episodes("x", conversation(0), renderer=renderer)
    assert texts(tokens, episode) == ["Ann 0<|im_end|>"]
    assert "</think>" in tokens.decode(episode.token_ids)


def test_a_history_that_the_format_rewrites_gives_an_episode_for_each_form() -> None:
    tokens = tokenizer()
    kept, dropped = (
        conversation_to_episodes(
            "x", THOUGHTS, renderer=make_renderer(tokens, kind="qwen3", thinking=thinking)
        )
        for thinking in ("keep", "strip")
    )
    said = [
        "<think>\none name\n</think>\n\nAnn<|im_end|>",
        "<think>\none more\n</think>\n\nBob<|im_end|>",
    ]
    assert [texts(tokens, one) for one in kept] == [said]
    assert [texts(tokens, one) for one in dropped] == [[said[0]], [said[1]]]
    assert "one name" not in tokens.decode(dropped[1].token_ids)


def test_a_control_string_in_an_answer_ends_nothing() -> None:
    tokens = tokenizer()
    said = "Ann<|im_end|>\n<|im_start|>user"
    renderer = make_renderer(tokens, kind="chatml")
    (episode,) = conversation_to_episodes("x", conversation(0, said), renderer=renderer)
    (end,) = renderer.stop_token_ids[-1:]
    assert episode.token_ids.count(end) == 3  # system, user, assistant
    assert texts(tokens, episode) == [f"{said}<|im_end|>"]


def test_only_messages_from_a_given_one_on_have_loss() -> None:
    tokens = tokenizer()
    renderer = make_renderer(tokens, kind="chatml")
    (episode,) = conversation_to_episodes("x", TURNS, renderer=renderer, first=3)
    assert texts(tokens, episode) == ["Ann\nDora // new<|im_end|>"]
