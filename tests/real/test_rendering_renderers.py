"""Real tokenizers (built here) and real renderers: prompts extend what the engine saw."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.real.models import tiny_model
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.experiments.alphabet_sort.task import POLICY_DIR
from torchtitan_rl.rollout.chatml import ChatMLRenderer
from torchtitan_rl.rollout.rendering import (
    LibraryRenderer,
    load_tokenizer,
    make_renderer,
)

CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOOLS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
QWEN3 = [*CHATML, "<think>", "</think>", *TOOLS]
# What SmolLM2 does: a default system prompt, then plain ChatML.
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are SmolLM<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Messages are trimmed, so that white space in them is not just appended.
TRIMMING_TEMPLATE = SMOLLM2_TEMPLATE.replace("message['content']", "message['content'] | trim")
# Numbers its messages from the end: every turn changes all the earlier ones.
COUNTING_TEMPLATE = SMOLLM2_TEMPLATE.replace(
    "message['role']", "message['role'] + (loop.revindex | string)"
)
PLAIN_TEMPLATE = SMOLLM2_TEMPLATE.replace("loop.first and", "false and")
TEMPLATES = {
    "SMOLLM2": SMOLLM2_TEMPLATE,
    "TRIMMING": TRIMMING_TEMPLATE,
    "COUNTING": COUNTING_TEMPLATE,
    # forgets all turns but the last two messages
    "LAST_TURN": PLAIN_TEMPLATE.replace("in messages %}", "in messages[-2:] %}", 1),
}


def build_tokenizer(tokens: list[str], template: str | None = None) -> PreTrainedTokenizerFast:
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("h", "e"), ("Ċ", "Ċ"), ("o", "Ċ")]  # BPE that could merge across a newline
    vocab = alphabet | {a + b: len(alphabet) + i for i, (a, b) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [AddedToken(token, normalized=False, special=token in CHATML) for token in tokens]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>" if tokens else None,
        chat_template=template,
    )


@pytest.mark.parametrize("family", ["shipped", "qwen3", "qwen2", "llama", "mistral"])
def test_a_tokenizer_is_the_one_that_transformers_chooses(family: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = POLICY_DIR if family == "shipped" else tiny_model(tmp_path, family=family)
    found, expected = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert type(found) is type(expected)
    assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert found.init_kwargs.keys() == expected.init_kwargs.keys()
    assert found.chat_template == expected.chat_template
    assert found.special_tokens_map == expected.special_tokens_map


FIRST = [{"role": "system", "content": "Sort."}, {"role": "user", "content": "hello\n"}]
MORE = [{"role": "user", "content": " and <more>\n\n"}]


def encode(tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("template", ["SMOLLM2", "TRIMMING", "COUNTING", "LAST_TURN"])
def test_qwen3_tokens_with_another_models_template_are_not_taken_for_qwen3(template):
    renderer = make_renderer(build_tokenizer(QWEN3, TEMPLATES[template]))
    assert isinstance(renderer, ChatMLRenderer)


def test_a_qwen3_that_never_thinks_gets_the_typed_renderer_without_an_empty_thought():
    tokenizer = build_tokenizer(QWEN3, PLAIN_TEMPLATE)
    renderer = make_renderer(tokenizer, thinking="off")
    assert isinstance(renderer, LibraryRenderer)
    prompt = renderer.initial_prompt(FIRST)
    assert prompt == make_renderer(tokenizer, kind="chatml").initial_prompt(FIRST)
    assert renderer.extend(prompt, encode(tokenizer, "ok"), MORE) == make_renderer(
        tokenizer, kind="chatml"
    ).extend(prompt, encode(tokenizer, "ok"), MORE)


def test_a_tokenizer_without_template_and_chatml_tokens_is_refused():
    with pytest.raises(ConfigError, match="no chat template"):
        make_renderer(build_tokenizer([]))


def test_qwen3_without_thinking_prefills_the_empty_thought_in_every_turn():
    tokenizer = build_tokenizer(QWEN3)
    renderer = make_renderer(tokenizer)
    prompt = renderer.initial_prompt(FIRST)
    header = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(prompt) == (
        "<|im_start|>system\nSort.<|im_end|>\n<|im_start|>user\nhello\n<|im_end|>\n" + header
    )
    completion = encode(tokenizer, "ok<|im_end|>")
    following = renderer.extend(prompt, completion, MORE)
    assert following[: len(prompt) + len(completion)] == prompt + completion
    assert tokenizer.decode(following[len(prompt) + len(completion) :]) == (
        "\n<|im_start|>user\n and <more>\n\n<|im_end|>\n" + header
    )


@pytest.mark.parametrize("tokens", [QWEN3, CHATML], ids=["qwen3", "chatml"])
@pytest.mark.parametrize("text", ["ok", "", "hello\n\n", "<|im_start|>he", "<tool_call>{"])
def test_trap_16_an_end_of_turn_that_was_not_sampled_is_only_in_the_next_prompt(tokens, text):
    tokenizer = build_tokenizer(tokens)
    renderer = make_renderer(tokenizer)
    prompt = renderer.initial_prompt(FIRST)
    cut = encode(tokenizer, text)
    ended = (*cut, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    after_cut, after_end = (renderer.extend(prompt, c, MORE) for c in (cut, ended))
    assert after_cut[: len(prompt) + len(cut)] == prompt + cut
    assert after_cut == after_end  # the same conversation, however the turn ended


def test_trap_17_extension_keeps_tokens_that_rendering_again_would_change():
    tokenizer = build_tokenizer(CHATML)
    renderer = make_renderer(tokenizer)
    prompt = renderer.initial_prompt(FIRST)
    odd = (*encode(tokenizer, "h"), *encode(tokenizer, "e"))  # BPE would make one token of them
    assert encode(tokenizer, "he") != odd
    following = renderer.extend(prompt, odd, MORE)
    assert following[: len(prompt) + 2] == prompt + odd
    again = renderer.initial_prompt([*FIRST, {"role": "assistant", "content": "he"}, *MORE])
    assert tokenizer.decode(again) == tokenizer.decode(following)
    assert again != following


@pytest.mark.parametrize("template", [None, SMOLLM2_TEMPLATE], ids=["bare", "smollm2"])
def test_chatml_extension_equals_the_template_for_canonical_tokens(template):
    tokenizer = build_tokenizer(CHATML, template)
    renderer = make_renderer(tokenizer)
    history = [{"role": "user", "content": "hello\n"}]
    prompt = renderer.initial_prompt(history)
    for reply in ("ok", "he said\n", "x\n\n"):
        completion = encode(tokenizer, reply + "<|im_end|>")
        extended = renderer.extend(prompt, completion, MORE)
        history = [*history, {"role": "assistant", "content": reply}, *MORE]
        assert extended == renderer.initial_prompt(history)
        prompt = extended


@pytest.mark.parametrize("template", [TRIMMING_TEMPLATE, COUNTING_TEMPLATE])
def test_chatml_does_not_extend_where_the_template_does_more_than_append(template):
    tokenizer = build_tokenizer(CHATML, template)
    renderer = make_renderer(tokenizer)
    prompt = renderer.initial_prompt(FIRST)
    assert renderer.extend(prompt, encode(tokenizer, "ok"), MORE) is None


def test_tokens_sampled_after_a_turns_end_are_not_silently_cut():
    tokenizer = build_tokenizer(QWEN3)
    renderer = make_renderer(tokenizer)
    prompt = renderer.initial_prompt(FIRST)
    assert renderer.extend(prompt, encode(tokenizer, "ok<|im_end|>more"), MORE) is None


def test_a_turn_that_ends_inside_a_thought_stays_as_it_was_sampled():
    tokenizer = build_tokenizer(QWEN3)
    renderer = make_renderer(tokenizer)
    prompt = renderer.initial_prompt(FIRST)
    ended, empty = encode(tokenizer, "<think>hm<|im_end|>"), encode(tokenizer, "<|im_end|>")
    following = renderer.extend(prompt, ended, MORE)
    assert following[: len(prompt) + len(ended)] == prompt + ended
    assert following[-20:] == renderer.extend(prompt, empty, MORE)[-20:]


def test_thoughts_stay_or_make_the_history_render_again_as_configured():
    tokenizer = build_tokenizer(QWEN3)
    completion = encode(tokenizer, "<think>\nhm\n</think>\n\nok<|im_end|>")
    keep, strip = (make_renderer(tokenizer, thinking=thinking) for thinking in ("keep", "strip"))
    prompt = keep.initial_prompt(FIRST)
    assert keep.extend(prompt, completion, MORE) is not None
    assert strip.extend(prompt, completion, MORE) is None
    message = strip.parse(completion, prompt)
    assert (message["content"], message["reasoning_content"]) == ("ok", "hm")
    assert "hm" not in tokenizer.decode(strip.initial_prompt([*FIRST, message, *MORE]))


def test_tool_calls_are_parsed_and_malformed_ones_kept_apart():
    tokenizer = build_tokenizer(QWEN3)
    renderer = make_renderer(tokenizer)
    text = (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        "<tool_call>\n{nonsense}\n</tool_call><|im_end|>"
    )
    message = renderer.parse(encode(tokenizer, text), renderer.initial_prompt(FIRST))
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert message["invalid_tool_calls"] == ["{nonsense}"]
