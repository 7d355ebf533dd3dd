"""vLLM's chat and completion classes, changed in three ways:

- For requests with ``return_token_ids``, answers have ``policy_versions``.
- An error before a stream's first token is an error response, not an event of the stream.
- A refusal has the message of the controller.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.outputs import CompletionOutput

from torchtitan_rl.backends.vllm.openai_constraints import call_mark, readable_calls
from torchtitan_rl.backends.vllm.openai_core import RefusedRequest
from torchtitan_rl.serving.middleware import close_at_end

_NO_BEAMS = "beam search is not served"
LAST_OF_CHOICE = '"finish_reason":"'  # in a choice's last chunk; null in its other chunks
_VLLMS_PARSER_OPTION = "--tool-call-parser to be set"  # in vLLM's refusal of a chat with tools
_NO_PARSER = (
    "tools need endpoint.tool_call_parser, which is not set: start the server with "
    "--endpoint.tool-call-parser and the parser of the policy's calls, such as hermes"
)


class AnswerStream:
    """A streamed answer whose first output is awaited before the response begins."""

    def __init__(self, outputs: AsyncIterator[Any]) -> None:
        self.chunks: AsyncIterator[str]
        self._outputs = outputs
        self._first: list[Any] = []

    async def begin(self) -> AsyncIterator[str]:
        """Wait for the first output and return the chunks. An error before that output is
        raised."""
        close_at_end(self._close)
        async for output in self._outputs:
            self._first.append(output)
            break
        return self.chunks

    async def _close(self) -> None:
        """Abort the requests of this answer that are still running."""
        for stream in (self.chunks, self._outputs):
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()

    async def outputs(self) -> AsyncGenerator[Any, None]:
        for output in self._first:
            yield output
        async for output in self._outputs:
            yield output


class _Versions:
    """Collects the policy versions of each choice of one answer; vLLM reports them with a choice's
    last token."""

    def __init__(self, num_choices: int = 1) -> None:
        """``num_choices``: the number of choices per prompt."""
        self._num_choices = num_choices
        self._runs: dict[int, list[list[int]]] = {}

    def note(self, prompt: int, output: CompletionOutput) -> None:
        if output.weight_versions is not None:
            runs = [[span.start, int(span.version)] for span in output.weight_versions]
            self._runs[prompt * self._num_choices + output.index] = runs

    async def noted(self, outputs: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """Pass on ``outputs`` (request outputs, or pairs of prompt index and request output), and
        collect their versions."""
        async for item in outputs:
            prompt, result = item if isinstance(item, tuple) else (0, item)
            for output in result.outputs:
                self.note(prompt, output)
            yield item

    def add_to(self, choices: list[Any]) -> None:
        for choice in choices:
            choice.policy_versions = self._runs.get(choice.index, [])

    async def added(self, chunks: AsyncIterator[str]) -> AsyncGenerator[str, None]:
        async for chunk in chunks:
            yield self._with_versions(chunk) if LAST_OF_CHOICE in chunk else chunk

    def _with_versions(self, chunk: str) -> str:
        body = json.loads(chunk.removeprefix("data: "))
        for choice in body["choices"]:
            if choice.get("finish_reason"):
                choice["policy_versions"] = self._runs.get(choice["index"], [])
        return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


class _Texts:
    """Collects the unparsed text of each choice of one answer."""

    def __init__(self) -> None:
        self.of_choice: defaultdict[int, str] = defaultdict(str)

    async def noted(self, outputs: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        async for result in outputs:
            for output in result.outputs:
                self.of_choice[output.index] += output.text
            yield result


class RefusalErrors:
    """Mixin for vLLM's serving classes: formats a refusal that comes after a stream has begun."""

    def create_streaming_error_response(self, message: Any, *args: Any, **options: Any) -> str:
        if isinstance(message, RefusedRequest):
            return json.dumps(message.refusal.body())
        answer: str = super().create_streaming_error_response(message, *args, **options)  # type: ignore[misc]
        return answer


class Chat(RefusalErrors, OpenAIServingChat):
    parser_cls: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser_cls = readable_calls(self.parser_cls)

    async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
        if request.use_beam_search:
            return self.create_error_response(_NO_BEAMS, param="use_beam_search")
        self.engine_client.constraints.admit(request)
        answer = await super().create_chat_completion(request, raw_request)
        if isinstance(answer, ErrorResponse) and _VLLMS_PARSER_OPTION in answer.error.message:
            return self.create_error_response(_NO_PARSER, param="tools")
        return await answer.begin() if isinstance(answer, AnswerStream) else answer

    async def chat_completion_full_generator(
        self, request: Any, outputs: AsyncIterator[Any], *args: Any, **options: Any
    ) -> Any:
        versions = _Versions()
        answer = await super().chat_completion_full_generator(
            request, versions.noted(outputs), *args, **options
        )
        for choice in getattr(answer, "choices", ()):  # an error has none
            message = choice.message
            self.engine_client.constraints.note_answer(
                request,
                arguments=[call.function.arguments for call in message.tool_calls or ()],
                text=message.content or "",
                mark=call_mark(self.parser_cls),
            )
        if request.return_token_ids and hasattr(answer, "choices"):
            versions.add_to(answer.choices)
        return answer

    def chat_completion_stream_generator(
        self, request: Any, outputs: AsyncIterator[Any], *args: Any, **options: Any
    ) -> AnswerStream:
        stream, versions = AnswerStream(outputs), _Versions()
        noted, texts = versions.noted(stream.outputs()), _Texts()
        if request.tools:
            noted = texts.noted(noted)
        chunks = super().chat_completion_stream_generator(request, noted, *args, **options)
        if request.tools:
            chunks = self._noted_calls(request, chunks, texts)
        stream.chunks = versions.added(chunks) if request.return_token_ids else chunks
        return stream

    async def _noted_calls(
        self, request: Any, chunks: AsyncIterator[str], texts: _Texts
    ) -> AsyncGenerator[str, None]:
        calls: defaultdict[int, defaultdict[int, str]] = defaultdict(lambda: defaultdict(str))
        async for chunk in chunks:
            if '"tool_calls":[' in chunk or LAST_OF_CHOICE in chunk:
                for choice in json.loads(chunk.removeprefix("data: "))["choices"]:
                    arguments = calls[choice["index"]]
                    for call in choice["delta"].get("tool_calls") or ():
                        arguments[call["index"]] += call["function"].get("arguments") or ""
                    if choice.get("finish_reason"):
                        self.engine_client.constraints.note_answer(
                            request,
                            arguments=list(arguments.values()),
                            text=texts.of_choice[choice["index"]],
                            mark=call_mark(self.parser_cls),
                        )
            yield chunk


class Completions(RefusalErrors, OpenAIServingCompletion):
    async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
        if request.use_beam_search:
            return self.create_error_response(_NO_BEAMS, param="use_beam_search")
        self.engine_client.constraints.admit(request)
        answer = await super().create_completion(request, raw_request)
        return await answer.begin() if isinstance(answer, AnswerStream) else answer

    def request_output_to_completion_response(
        self, results: list[Any], request: Any, *args: Any, **options: Any
    ) -> Any:
        answer = super().request_output_to_completion_response(results, request, *args, **options)
        if request.return_token_ids:
            versions = _Versions(request.n or 1)
            for prompt, result in enumerate(results):
                for output in result.outputs:
                    versions.note(prompt, output)
            versions.add_to(answer.choices)
        return answer

    def completion_stream_generator(
        self, request: Any, prompts: Any, outputs: AsyncIterator[Any], *args: Any, **options: Any
    ) -> AnswerStream:
        stream, versions = AnswerStream(outputs), _Versions(request.n or 1)
        chunks = super().completion_stream_generator(
            request, prompts, versions.noted(stream.outputs()), *args, **options
        )
        stream.chunks = versions.added(chunks) if request.return_token_ids else chunks
        return stream
