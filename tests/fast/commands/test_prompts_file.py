"""Lines of a prompts file and of its answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.scripted_engine import ScriptedEngine
from torchtitan_rl.commands.generate import (
    GenerateOptions,
    _complete_file,
    format_completion,
    format_error,
    parse_line,
)
from torchtitan_rl.configs.calculator_agent_tiny import config
from torchtitan_rl.errors import InvalidRequestError
from torchtitan_rl.generation.config import LoopConfig
from torchtitan_rl.generation.loop import EngineLoop
from torchtitan_rl.types import Completion, FinishReason, SamplingParams, VersionRun

DEFAULTS = SamplingParams(max_tokens=7, temperature=0.5)


def render(messages: list[dict[str, str]]) -> list[int]:
    return [len(message["content"]) for message in messages]


def parse(text: str | bytes):
    line = text.encode() if isinstance(text, str) else text
    return parse_line(line, 3, defaults=DEFAULTS, encode=lambda text: [len(text)], render=render)


def complete(folder: Path) -> tuple[int, str]:
    options = GenerateOptions(
        model=str(config.policy.checkpoint), input=folder / "in", output=folder / "out"
    )
    loop = EngineLoop(ScriptedEngine(), None, is_leader=True, config=LoopConfig())
    loop.start()
    return _complete_file(options, Path(options.model), loop)


def test_a_line_takes_what_it_does_not_say_from_the_options() -> None:
    name, request = parse(
        '{"prompt": "abc", "top_k": 5, "stop_token_ids": [1, 2], "ignore_eos": true}'
    )
    assert name == 3
    assert request.request_id == "line-3"
    assert request.prompt_token_ids == (3,)
    assert request.sampling == SamplingParams(
        max_tokens=7, temperature=0.5, top_k=5, stop_token_ids=(1, 2), ignore_eos=True
    )


def test_a_line_may_have_a_conversation_and_strings_that_end_its_answer() -> None:
    messages = [{"role": "system", "content": "abc"}, {"role": "user", "content": "a"}]
    _, request = parse(json.dumps({"messages": messages, "stop": "x"}))
    assert request.prompt_token_ids == (3, 1)
    assert request.sampling.stop == ("x",)
    assert parse('{"prompt": "a", "stop": ["x", "y"]}')[1].sampling.stop == ("x", "y")


def test_an_integer_is_a_temperature_but_a_fraction_is_no_budget() -> None:
    assert parse('{"prompt": "a", "temperature": 1}')[1].sampling.temperature == 1.0
    _, error = parse('{"prompt": "a", "max_tokens": 1.5}')
    assert "line 3: Expected `int`, got `float` - at `$.max_tokens`" in str(error)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 3: not JSON .*; write one JSON object in UTF-8"),
        (b'{"prompt": "caf\xe9"}', "line 3: not JSON .*can't decode byte 0xe9"),
        ('{"prompt": "\\ud800 a"}', r"line 3: '\\ud800' is half of a surrogate pair: remove it"),
        ('{"prompt": "a", "id": "\\ud800"}', "half of a surrogate pair"),
        ('{"prompt": "a", "stop": "\\ud800"}', "half of a surrogate pair"),
        (f'{{"prompt": "a", "seed": {"9" * 5000}}}', "line 3: not JSON .*5000 digits"),
        (200_000 * "[", "line 3: not JSON .*recursion"),
        (f'{{"prompt": {970 * "["}{970 * "]"}}}', "line 3: "),
        ("[1]", "not a JSON object"),
        ("{}", "give one of prompt"),
        ('{"prompt": "a", "prompt_token_ids": [1]}', "give one of prompt"),
        ('{"prompt": "a", "messages": []}', "give one of prompt"),
        ('{"messages": "Hi"}', "use a list such as"),
        ('{"messages": []}', "use a list such as"),
        ('{"messages": [{"content": "Hi"}]}', "use a list such as"),
        ('{"messages": [{"role": "user"}]}', "use a list such as"),
        ('{"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}', "use a list such as"),
        ('{"messages": [{"role": "assistant", "tool_calls": [1]}]}', "the chat template refuses"),
        ('{"prompt": "a", "stop": ""}', "use a string or a list of them"),
        ('{"prompt": "a", "stop": [3]}', r"`str`, got `int` - at `\$.stop\[0\]`"),
        ('{"prompt": "a", "seed": true}', r"got `bool` - at `\$.seed`"),
        ('{"prompt": 4}', "use a string"),
        ('{"prompt_token_ids": [1, false]}', "use a list of integers"),
        ('{"prompt_token_ids": "12"}', "use a list of integers"),
        ('{"prompt": "a", "n": 2}', r"unknown fields \['n'\]"),
        ('{"prompt": "a", "temperature": "hot"}', r"`float`, got `str` - at `\$.temperature`"),
        ('{"prompt": "a", "id": [1]}', "use a string or an integer"),
        ('{"prompt": "a", "ignore_eos": 1}', r"`bool`, got `int` - at `\$.ignore_eos`"),
    ],
)
def test_a_error_is_the_answer_of_its_line(text: str, message: str) -> None:
    _, error = parse(text)
    with pytest.raises(InvalidRequestError, match=message):
        raise error


def test_trap_15_a_logprob_that_is_not_a_number_is_null_in_the_answer() -> None:
    completion = Completion(
        request_id="line-1",
        token_ids=(1, 2),
        logprobs=(float("nan"), -0.5),
        version_runs=(VersionRun(0, 4),),
        finish_reason=FinishReason.STOP,
    )
    answer = json.loads(format_completion("a", completion, lambda ids: "é" * len(ids)))
    assert answer["logprobs"] == [None, -0.5]
    assert (answer["id"], answer["text"], answer["versions"]) == ("a", "éé", [4, 4])
    assert json.loads(format_error(2, "why")) == {"id": 2, "error": "why"}


BAD = [
    b'{"prompt": "\\ud800"}',
    b'{"prompt_token_ids": [5], "id": "\\ud800"}',
    b"[" * 200_000,
    b"\xe9",
]


def test_a_bad_line_costs_no_other_line_its_answer(tmp_path: Path) -> None:
    good = b'{"prompt_token_ids": [5], "max_tokens": 1}'
    (tmp_path / "in").write_bytes(b"\r\n".join([good, *BAD, good]))
    num_errors, said = complete(tmp_path)
    assert num_errors == len(BAD)
    assert said.startswith(f"2 completions, {len(BAD)} errors, ")
    answers = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [1, 2, 3, 4, 5, 6]
    assert [answer["id"] for answer in answers if "error" in answer] == [2, 3, 4, 5]


def test_a_file_of_which_nothing_was_completed_ends_with_a_cause(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"prompt_token_ids": [5, 1000]}\n' * 2)
    num_errors, said = complete(tmp_path)
    assert num_errors == 2
    assert said.startswith("0 completions, 2 errors, ")
    assert "the first error: " in said
    assert "prompt_token_ids holds 1000, outside the vocabulary 0..999" in said
