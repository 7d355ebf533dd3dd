"""``torchtitan-rl generate --model MODEL --input prompts.jsonl --output out.jsonl``: completes a
file of prompts with one vLLM replica, without Monarch.

Under ``torchrun --nproc-per-node=N -m torchtitan_rl.commands.generate ...`` the replica has N
tensor-parallel ranks. vLLM's output goes to ``out.jsonl.log``. The output of vLLM on another rank N
goes to ``out.jsonl.rankN.log``.

A line of the prompts file has ``prompt`` (text), ``prompt_token_ids`` or ``messages`` (a
conversation, rendered by the model's chat template), and may have ``id`` and any field of
`SamplingParams`; ``stop`` may be one string. Each line gets one answer, in the order of the input:
a completion, or an object with ``error``.

Exit codes: 0 every line was completed; 1 some lines were not (their answers say why); 2 the options
are wrong.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from annotated_types import Interval

from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.bounds import Count, Name, PositiveShare, Seed, Share, Tokens, field_errors
from torchtitan_rl.commands.console import (
    after_last_message,
    divert_everything,
    divert_libraries,
    exit_code_of,
    without_python_output,
)
from torchtitan_rl.config.checks import generator_errors
from torchtitan_rl.config.loader import parse_options
from torchtitan_rl.config.model import find_policy, resolve_checkpoint
from torchtitan_rl.config.run import File, output_file_errors
from torchtitan_rl.errors import ConfigError, GenerationError, InvalidRequestError
from torchtitan_rl.files import parse_object
from torchtitan_rl.generation.config import EngineConfig, GeneratorConfig
from torchtitan_rl.generation.engine import MAX_SEED
from torchtitan_rl.launch.interfaces import listen_privately
from torchtitan_rl.launch.own_user import use_private_folder
from torchtitan_rl.orchestration.config import MAY_BE_GREEDY
from torchtitan_rl.rollout.rendering import load_tokenizer, make_renderer
from torchtitan_rl.types import Completion, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from torchtitan_rl.generation.loop import EngineLoop

Device = Literal["cpu", "cuda"]

_SHARED = tuple(field.name for field in fields(EngineConfig))


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(EngineConfig):
    """Complete a file of prompts. A line may override the sampling options."""

    model: Name
    """A directory in Hugging Face format, ``package:NAME``, or the name of a model on the Hugging
    Face hub."""
    input: File
    """JSONL file with ``prompt``, ``prompt_token_ids`` or ``messages`` in each line, and optionally
    ``id`` and sampling fields such as ``stop``."""
    output: File
    """JSONL file for the answers, in the order of the input."""
    max_tokens: Tokens = 64
    """Maximum length of a completion, in tokens."""
    temperature: Annotated[float, MAY_BE_GREEDY] = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: PositiveShare = 1.0
    """Sample from the most likely tokens with this total probability; 1 keeps every token."""
    top_k: Count = 0
    """Sample from the most likely ``top_k`` tokens; 0 keeps every token."""
    min_p: Share = 0.0
    """Exclude tokens less likely than this share of the most likely token's probability; 0 keeps
    every token."""
    ignore_eos: bool = False
    """Continue after an end-of-sequence token."""
    seed: Annotated[int, Interval(ge=-MAX_SEED, le=MAX_SEED)] | None = None
    """Seed of every line. By default lines draw from the engine's generator."""
    engine_seed: Seed = 0
    """Seed of the engine's generator."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` is the device that the installed vLLM is built for."""

    def generator(self) -> GeneratorConfig:
        """The configuration of the one replica, with a rank for each process of torchrun."""
        return GeneratorConfig(
            replicas=1,
            tensor_parallel=int(os.environ.get("WORLD_SIZE", "1")),
            heartbeat_s=min(60.0, self.collective_timeout_s / 4),
            **{name: getattr(self, name) for name in _SHARED},
        )

    def errors(self) -> list[str]:
        """Errors in single options or, if there are none, all other errors."""
        if wrong := field_errors(self, "--"):
            return list(wrong.values())
        found = _model_errors(self)
        if not os.path.isfile(self.input):
            found.append(f"--input is {self.input}: it is not a file; give a JSONL file of prompts")
        return found + output_file_errors("--output", self.output)


def _model_errors(options: GenerateOptions) -> list[str]:
    try:
        _, policy = find_policy(options.model, field="--model")
    except ConfigError as error:
        return error.errors
    is_on_cpu = _device(options) == "cpu"
    return [
        re.sub(r"generator\.(\w+)", lambda name: f"--{name[1].replace('_', '-')}", message)
        for message in generator_errors(options.generator(), policy, is_on_cpu=is_on_cpu)
    ]


def main(words: Sequence[str]) -> int:
    options = parse_options(GenerateOptions, words, prog="torchtitan-rl generate")
    if errors := options.errors():
        raise ConfigError(errors)
    model = resolve_checkpoint(options.model, field="--model")
    device = _prepare_environment(options)
    rank = int(os.environ.get("RANK", "0"))
    divert_libraries(Path(f"{options.output}{f'.rank{rank}' if rank else ''}.log"))
    with without_python_output():
        from torchtitan_rl.backends.vllm.engine import start_engine_loop

        spec = GeneratorSpec(
            model=model,
            name="generate",
            device=device,
            seed=options.engine_seed,
            generator=options.generator(),
        )
        loop = start_engine_loop(spec, rank)
        if rank == 0:
            num_errors, outcome = _complete_file(options, model, loop)
        else:
            loop.join()
            num_errors = int(loop.failure is not None)
            outcome = f"error: rank {rank}: {loop.failure}" if loop.failure else ""
    if outcome:
        print(outcome, file=sys.stderr)
    after_last_message(min(1, num_errors))
    divert_everything()
    return min(1, num_errors)


def _prepare_environment(options: GenerateOptions) -> Device:
    """Set the environment variables of vLLM and torch, except those that are already set. Call this
    before torch is imported."""
    from torchtitan_rl.backends.vllm.cpu import engine_environment

    use_private_folder()
    listen_privately()
    device = _device(options)
    environment = engine_environment(
        options.threads, device, batch_invariant=options.batch_invariant
    )
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    return device


def _device(options: GenerateOptions) -> Device:
    from torchtitan_rl.backends.vllm.cpu import installed_device

    return installed_device() if options.device == "auto" else options.device


def _complete_file(options: GenerateOptions, model: Path, loop: EngineLoop) -> tuple[int, str]:
    """Submit every line, write every answer, and close the loop. Returns the number of lines that
    were not completed, and a summary in one sentence."""
    tokenizer = load_tokenizer(model)

    def render(messages: list[Any]) -> Sequence[int]:
        return make_renderer(tokenizer, kind="template").initial_prompt(messages)

    defaults = SamplingParams(
        **{name: getattr(options, name) for name in _SAMPLING if hasattr(options, name)}
    )
    start_s, num_tokens = time.monotonic(), 0
    failed: list[str] = []
    answers: list[tuple[str | int, Future[Completion]]] = []
    try:
        with options.input.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    name, request = parse_line(
                        line, number, defaults=defaults, encode=tokenizer.encode, render=render
                    )
                    answers.append((name, _submit(request, loop)))
        with options.output.open("w", encoding="utf-8") as output:
            for name, future in answers:
                text, sampled = _answer(name, future, tokenizer.decode)
                output.write(text + "\n")
                output.flush()
                num_tokens += sampled or 0
                if sampled is None:
                    failed.append(text)
    finally:
        loop.close()
    took_s = time.monotonic() - start_s
    first = f"; the first error: {failed[0]}" if failed else ""
    return len(failed), (
        f"{len(answers) - len(failed)} completions, {len(failed)} errors, {num_tokens} tokens in "
        f"{took_s:.1f} s ({num_tokens / took_s:.0f} tokens/s): {options.output}{first}"
    )


def _submit(
    request: GenerationRequest | InvalidRequestError, loop: EngineLoop
) -> Future[Completion]:
    try:
        if isinstance(request, InvalidRequestError):
            raise request
        return loop.submit(request)
    except InvalidRequestError as error:
        refused: Future[Completion] = Future()
        refused.set_exception(error)
        return refused


def _answer(
    name: str | int, future: Future[Completion], decode: Callable[[list[int]], str]
) -> tuple[str, int | None]:
    """The line to write, and the number of sampled tokens (None if the completion failed)."""
    try:
        completion = future.result()
    except GenerationError as error:
        return format_error(name, str(error)), None
    return format_completion(name, completion, decode), len(completion.token_ids)


_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_SAMPLING = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("stop", "stop_token_ids", "ignore_eos"),
)


def parse_line(
    line: bytes,
    number: int,
    *,
    defaults: SamplingParams,
    encode: Callable[[str], list[int]],
    render: Callable[[list[Any]], Sequence[int]],
) -> tuple[str | int, GenerationRequest | InvalidRequestError]:
    """Parse line ``number``. Returns the line's id (if it has none, its number), and the request or
    the error in the line.

    Args:
        render: returns the tokens of a conversation and of the answer's header; may raise any
            exception.
    """
    name: str | int = number
    try:
        fields = parse_object(f"line {number}", line)
    except ValueError as error:
        return name, InvalidRequestError(f"{error}; write one JSON object in UTF-8")
    try:
        _require_text(fields)
        given = fields.get("id", number)
        if isinstance(given, bool) or not isinstance(given, str | int):
            raise InvalidRequestError(f"id = {given!r}: use a string or an integer")
        name = given
        request = GenerationRequest(
            # Ids in a file may repeat, but ids of requests must not.
            request_id=f"line-{number}",
            prompt_token_ids=_prompt(fields, encode, render),
            sampling=_sampling(fields, defaults),
        )
    except (InvalidRequestError, msgspec.ValidationError, RecursionError) as error:
        return name, InvalidRequestError(f"line {number}: {error}")
    return name, request


def format_completion(
    name: str | int, completion: Completion, decode: Callable[[list[int]], str]
) -> str:
    """Format a completion as a line of the output. A logprob that is not finite becomes null."""
    return json.dumps(
        {
            "id": name,
            "token_ids": completion.token_ids,
            "text": decode(list(completion.token_ids)),
            "logprobs": [value if math.isfinite(value) else None for value in completion.logprobs],
            "versions": completion.versions,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "metrics": asdict(completion.metrics) if completion.metrics else None,
        },
        ensure_ascii=False,
    )


def format_error(name: str | int, error: str) -> str:
    return json.dumps({"id": name, "error": error}, ensure_ascii=False)


def _require_text(fields: Mapping[str, Any]) -> None:
    """Refuse half of a surrogate pair: the tokenizer and the output cannot encode it as UTF-8."""
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise InvalidRequestError(f"{half!r} is half of a surrogate pair: remove it") from error


def _prompt(
    fields: Mapping[str, Any],
    encode: Callable[[str], list[int]],
    render: Callable[[list[Any]], Sequence[int]],
) -> tuple[int, ...]:
    given = [name for name in _PROMPTS if name in fields]
    if len(given) != 1:
        raise InvalidRequestError("give one of prompt (text), prompt_token_ids and messages")
    value = fields[given[0]]
    match given[0]:
        case "prompt_token_ids":
            if not isinstance(value, list) or not all(type(item) is int for item in value):
                raise InvalidRequestError(f"{given[0]} = {value!r}: use a list of integers")
            return tuple(value)
        case "messages":
            if not isinstance(value, list) or not value or not all(map(_is_message, value)):
                example = '[{"role": "user", "content": "Hi"}]'
                raise InvalidRequestError(f"messages = {value!r}: use a list such as {example}")
            try:
                return tuple(render(value))
            except Exception as error:  # the model's template may raise any exception
                cause = f"the chat template refuses them: {error}"
                raise InvalidRequestError(f"messages: {cause}") from error
    if not isinstance(value, str):
        raise InvalidRequestError(f"prompt = {value!r}: use a string")
    return tuple(encode(value))


def _is_message(value: Any) -> bool:
    """Whether ``value`` is a message. A message that only calls tools needs no content."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        return False
    content = value.get("content")
    return isinstance(content, str) or (content is None and bool(value.get("tool_calls")))


def _sampling(fields: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    known = {"id", *_PROMPTS, *_SAMPLING}
    if unknown := sorted(fields.keys() - known):
        raise InvalidRequestError(f"unknown fields {unknown}; known are {sorted(known)}")
    given = {name: fields[name] for name in _SAMPLING if name in fields}
    if isinstance(stop := given.get("stop"), str):
        given["stop"] = [stop]
    sampling = msgspec.convert(asdict(defaults) | given, SamplingParams)
    if "" in sampling.stop:
        raise InvalidRequestError(f"stop = {stop!r}: use a string or a list of them, none empty")
    return sampling


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
