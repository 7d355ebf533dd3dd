"""Options of requests that have broken servers, ours among them, to be merged into a small request
that is served."""

from __future__ import annotations

from typing import Any

MAX_MODEL_LEN = 512


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}}
FILE = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}

# What text and chat requests are made of that broke something somewhere.
HARD_FOR_BOTH: list[dict[str, Any]] = [
    {"structured_outputs": outputs}
    for outputs in (
        {"grammar": "root ::= root"},  # allows no token: vLLM ends the request by "error"
        {"grammar": "root ::= "},
        {"grammar": "x"},
        {"regex": "("},
        {"regex": "((a{100}){100}){100}"},
        {"regex": "a{1,100000000}"},
        {"choice": []},
        {"choice": [""]},
        {"json": "{"},
        {"json": {"$ref": "#"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"type": "zzz"}},
        {"json": {"enum": []}},
        {"json": {"type": "array", "minItems": 1000000000}},
        {"json": nested(25)},
        {"json": True},
        {"structural_tag": "{}"},
        {},
        {"regex": "a", "choice": ["b"]},
    )
] + [
    {"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [1]},  # contradict each other
    {"logit_bias": {"99999999": 1}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {str(token): -100 for token in range(288)}},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [99999]},
    {"allowed_token_ids": [-1]},
    {"stop_token_ids": [1 << 40]},
    {"stop_token_ids": [-1]},
    {"stop": ["x"] * 10000},
    {"stop": [""]},
    {"stop": "x" * 1000000},
    {"bad_words": [""]},
    {"bad_words": ["ab"] * 10000},
    {"prompt_logprobs": 1},
    {"prompt_logprobs": 0, "stream": True},
    {"seed": (1 << 63) - 1},
    {"seed": -(1 << 63)},
    {"seed": 1 << 63},
    {"temperature": 1e-300},
    {"temperature": 1e300},
    {"temperature": -1},
    {"top_p": 0},
    {"top_p": 1e-300},
    {"top_k": 1 << 62},
    {"top_k": -5},
    {"presence_penalty": 1e308},
    {"repetition_penalty": 1e-300},
    {"truncate_prompt_tokens": -1},
    {"truncate_prompt_tokens": 1000},
    {"min_tokens": 4, "stop": ["a"]},
    {"use_beam_search": True, "n": 4},
    {"n": 0},
    {"n": -1},
    {"n": 16},
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"request_id": "../é\n"},
    {"kv_transfer_params": {"do_remote_decode": True}},
    {"repetition_detection": {"max_pattern_size": 1 << 40, "min_count": 2}},
    {"logprob_token_ids": [99999]},
    {"user": "\x00"},
    # NaN logprobs, which are no JSON:
    {"repetition_penalty": 1e-40, "logprobs": 1, "top_logprobs": 1},
    {"repetition_penalty": 1e-308, "logprobs": 5, "top_logprobs": 5},
]
HARD_TEXT: list[dict[str, Any]] = [
    {"prompt": prompt}
    for prompt in ([99999999], [-1], [288], [1 << 63], [], [[]], "", [""], ["a", ""], [[1], "a"])
] + [
    {"prompt": "x" * MAX_MODEL_LEN},
    {"prompt": "x" * 3000000},
    {"prompt": [65] * MAX_MODEL_LEN, "max_tokens": 0},
    {"echo": True, "logprobs": 2},
    {"logprobs": 100},
    {"logprobs": -2},
    {"prompt_embeds": "AAAA"},
    {"suffix": "a"},
]
HARD_CHAT: list[dict[str, Any]] = [
    {"messages": messages}
    for messages in (
        [],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "zzz", "content": "a"}],
        [{"content": "a"}],
        [{"role": "user", "content": "x" * 5000}],
        [{"role": "user", "content": [IMAGE]}],
        [{"role": "user", "content": [FILE]}],
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        [{"role": "tool", "content": "a"}],
    )
] + [
    {"tools": [FUNCTION], "tool_choice": "required"},
    {"tools": [], "tool_choice": "required"},
    {"tool_choice": "required"},
    {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}}}]},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "structural_tag", "structures": [], "triggers": []}},
    {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
    {"chat_template_kwargs": {"chat_template": "{{ x.y.z }}"}},
    {"chat_template_kwargs": {"conversation": 1, "tokenize": True, "return_tensors": "pt"}},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"top_logprobs": 100, "logprobs": True},
]
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
HARD_RESPONSES: list[dict[str, Any]] = [
    {"input": items}
    for items in (
        "",
        "x" * 5000,
        [],
        [{}],
        [CALL],
        [CALL, CALL],
        [{"type": "function_call_output", "call_id": "nobody's", "output": ""}],
        [{"type": "item_reference", "id": "x"}],
        [{"type": "reasoning", "summary": [], "encrypted_content": "AAAA"}],
        [{"type": "reasoning", "id": "x", "summary": [], "status": "incomplete"}],
        [{"type": "message", "role": "assistant", "content": [], "status": "incomplete"}],
        [{"type": "message", "role": "assistant", "content": []}],
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}],
        [
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "refusal", "refusal": "no"}],
            }
        ],
        [{"role": "user", "content": [{"type": "input_image", "image_url": "http://[::1]/x"}]}],
        [{"type": "computer_call_output", "call_id": "c", "output": {"type": "image"}}],
    )
] + [
    {"previous_response_id": "resp_unknown"},
    {"previous_input_messages": [{"role": "user", "content": "a"}]},
    {"background": True},
    *({name: None} for name in ("background", "store", "tools", "tool_choice", "text", "metadata")),
    *({name: None} for name in ("parallel_tool_calls", "truncation", "include", "temperature")),
    {"store": False, "include": ["reasoning.encrypted_content"]},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 100},
    {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"$ref": "#/nowhere"}}}},
    {"tools": [{"type": "web_search"}], "tool_choice": "required"},
    {"tools": [{"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:1"}]},
    {"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]},
    {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
    {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": []}},
    {"tools": [{"type": "custom", "name": "f"}], "tool_choice": "required"},
    {"tools": [{"type": "function", "name": "f", "strict": True, "parameters": {"$ref": "#/x"}}]},
    {"max_output_tokens": 0},
    {"request_id": "../é\n"},
    {"truncation": "auto", "input": "x" * 600},
    {"reasoning": {"effort": "high", "summary": "detailed"}},
    {"stop": ["x"] * 10000},
    {"logit_bias": {"99999999": 1}},
    {"structured_outputs": {"grammar": "root ::= root"}},
    {"kv_transfer_params": {"do_remote_decode": True}},
]
CLAUDE_TOOL = {"name": "f", "input_schema": {"type": "object"}}
HARD_MESSAGES: list[dict[str, Any]] = [
    {"messages": messages}
    for messages in (
        [],
        [{"role": "user", "content": ""}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": "x" * 5000}],
        [{"role": "system", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "assistant", "content": [{"type": "tool_use"}]}],
        [{"role": "user", "content": [{"type": "tool_result"}]}],
        [{"role": "user", "content": [{"type": "tool_reference"}]}],
        [{"role": "user", "content": [{"type": "redacted_thinking", "data": "AAAA"}]}],
        [{"role": "user", "content": [{"type": "image", "source": {"type": "base64"}}]}],
        [{"role": "user", "content": [{"type": "document", "source": {"type": "text"}}]}],
        [{"role": "system", "content": [{"type": "tool_removal", "tool": {"type": "x"}}]}],
    )
] + [
    {"system": [{"type": "image", "source": {}}]},
    {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "tool", "name": "g"}},
    {"tools": [CLAUDE_TOOL, CLAUDE_TOOL], "tool_choice": {"type": "any"}},
    {"tools": [], "tool_choice": {"type": "any"}},
    {"tool_choice": {"type": "any"}},
    {"tools": [{"name": "f", "strict": True, "input_schema": {"$ref": "#/nowhere"}}]},
    {"output_config": {"format": {"type": "json_schema", "schema": {"type": "zzz"}}}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
    {"thinking": {"type": "disabled"}},
    {"stop_sequences": ["x"] * 1000},
    {"stop_sequences": [""]},
    {"max_tokens": 0},
    {"temperature": -1},
    {"top_k": 1 << 62},
    {"top_p": 0},
]
