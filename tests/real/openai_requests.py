"""What is asked of our endpoint and of vLLM's own server."""

from __future__ import annotations

from typing import Any

from tests.real.models import SPECIAL_TOKENS

MESSAGES = [{"role": "user", "content": "hello there"}]
BASE = {"model": "policy", "messages": MESSAGES, "max_tokens": 24, "seed": 5}
TEXT = {"model": "policy", "prompt": "once upon", "max_tokens": 24, "seed": 5}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
# A model with random weights calls no tool unless it is made to.
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9]{2}, "b": [0-9]\}\}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "size": {"type": "boolean"}},
    "required": ["colour", "size"],
    "additionalProperties": False,
}
THINK_END, END = (256 + SPECIAL_TOKENS.index(token) for token in ("</think>", "<|im_end|>"))


def extra(**body: Any) -> dict[str, Any]:
    """What is not in the client's signatures."""
    return {"extra_body": body}


CHATS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {},
    "warm and truncated": {"temperature": 0.7, "top_p": 0.9, **extra(top_k=20, min_p=0.01)},
    "three answers": {"n": 3},
    "logprobs": {"logprobs": True},
    "top logprobs": {"logprobs": True, "top_logprobs": 5, "n": 2},
    "top logprobs of a truncated distribution": {
        "logprobs": True,
        "top_logprobs": 5,
        "top_p": 0.5,
    },
    "stop strings": {"stop": [" ", "e", "o"], "max_tokens": 200},
    "an included stop string": {
        "stop": ["e", "o"],
        "max_tokens": 200,
        **extra(include_stop_str_in_output=True),
    },
    "a stop string after a minimum": {
        "stop": ["e", "o"],
        "max_tokens": 200,
        **extra(min_tokens=60),
    },
    "a stop string that was not met": {"stop": ["never to be seen"]},
    "a special token as stop string": {
        "stop": ["<|fim_middle|>", "<|im_start|>"],
        "max_tokens": 300,
        **extra(skip_special_tokens=False),
    },
    "stop tokens": {"max_tokens": 200, **extra(stop_token_ids=[65, 66, 67, 68])},
    "no end of sequence": {"max_tokens": 200, **extra(ignore_eos=True)},
    "penalties": {
        "max_tokens": 100,
        "presence_penalty": 0.5,
        "frequency_penalty": 1.5,
        **extra(repetition_penalty=1.2),
    },
    "logit bias": {"logit_bias": {"65": 8, "66": -100}, "logprobs": True, "top_logprobs": 2},
    "bad words": {**extra(bad_words=["a", "bc"], allowed_token_ids=list(range(64, 90)))},
    "a JSON schema": {
        "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
    "a JSON object": {"max_tokens": 60, "response_format": {"type": "json_object"}},
    "a regular expression": {**extra(structured_outputs={"regex": "[a-c]{3}-[0-9]{4}"})},
    "a choice": {**extra(structured_outputs={"choice": ["red", "green", "blue"]})},
    "a forced tool": {
        "seed": 3,
        "max_tokens": 200,
        "tools": [ADD],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    },
    "a required tool": {"seed": 3, "max_tokens": 200, "tools": [ADD], "tool_choice": "required"},
    "a tool by itself": {
        "max_tokens": 200,
        "tools": [ADD],
        "tool_choice": "auto",
        **extra(structured_outputs={"regex": CALL}),
    },
    "no tool by itself": {"tools": [ADD], "tool_choice": "auto"},
    "tools that are forbidden": {"tools": [ADD], "tool_choice": "none"},
    "one token": {"max_tokens": 1},
    "all the context": {"max_tokens": None, "n": 2},
    "token ids": {"n": 2, **extra(return_token_ids=True)},
    "continued": {**extra(add_generation_prompt=False, continue_final_message=True)},
    "usage": {},
}
TEXTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "token ids in": {"prompt": [65, 66, 67, 200, 270]},
    "several prompts": {"prompt": ["abc", "xyz"], "n": 2, **extra(return_token_ids=True)},
    "several prompts of token ids": {"prompt": [[65, 66], [90]], "stop": ["e", "o"]},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 4},
    "no further logprobs": {"logprobs": 0, "n": 2},
    "an empty stop list": {"stop": []},
    "two stop strings": {"stop": ["th", "o"], "max_tokens": 300, "logprobs": 1},
}
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "unknown model": ("/chat/completions", {**BASE, "model": "gpt"}),
    "long prompt": (
        "/chat/completions",
        {**BASE, "messages": [{"role": "user", "content": "x" * 600}]},
    ),
    "prompt that leaves no room": ("/completions", {**TEXT, "prompt": [65] * 512}),
    "long prompt of ids": ("/completions", {**TEXT, "prompt": [65] * 513}),
    "unknown token": ("/completions", {**TEXT, "prompt": [65, 100_000]}),
    "negative token": ("/completions", {**TEXT, "prompt": [-1]}),
    "empty prompt": ("/completions", {**TEXT, "prompt": []}),
    "no messages": ("/chat/completions", {"model": "policy"}),
    "messages of a wrong type": ("/chat/completions", {**BASE, "messages": "hi"}),
    "temperature": ("/chat/completions", {**BASE, "temperature": -1}),
    "hot": ("/chat/completions", {**BASE, "temperature": 1e9}),
    "no tokens": ("/chat/completions", {**BASE, "max_tokens": 0}),
    "too many tokens": ("/chat/completions", {**BASE, "max_completion_tokens": 5000}),
    "no answer": ("/chat/completions", {**BASE, "n": 0}),
    "greedy siblings": ("/chat/completions", {**BASE, "n": 2, "temperature": 0}),
    "too many logprobs": ("/chat/completions", {**BASE, "logprobs": True, "top_logprobs": 50}),
    "top logprobs alone": ("/chat/completions", {**BASE, "top_logprobs": 2}),
    "bias of no token": ("/chat/completions", {**BASE, "logit_bias": {"x": 1}}),
    "bias of an unknown token": ("/chat/completions", {**BASE, "logit_bias": {"99999": 1}}),
    "schema": (
        "/chat/completions",
        {**BASE, "structured_outputs": {"json": '{"type": "nothing"}'}},
    ),
    "regex": ("/chat/completions", {**BASE, "structured_outputs": {"regex": "[a"}}),
    "tool of no name": (
        "/chat/completions",
        {**BASE, "tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "x"}}},
    ),
    "template": ("/chat/completions", {**BASE, "chat_template": "{{ messages }}"}),
    "image": (
        "/chat/completions",
        {
            **BASE,
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}],
                }
            ],
        },
    ),
}
UNSERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "logprobs of the prompt": ("/completions", {**TEXT, "echo": True, "logprobs": 1}),
    "beams": ("/chat/completions", {**BASE, "use_beam_search": True, "n": 2}),
    "cache salt": ("/chat/completions", {**BASE, "cache_salt": "x"}),
    "repetitions": (
        "/chat/completions",
        {**BASE, "repetition_detection": {"max_pattern_size": 2, "min_count": 3}},
    ),
}
