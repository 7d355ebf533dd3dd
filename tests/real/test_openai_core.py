"""The engine core that vLLM's front end sees: every token once, in order, under its own version.

These import vLLM, and play without an engine.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.parser import ParserManager
from vllm.sampling_params import RequestOutputKind
from vllm.sampling_params import SamplingParams as VllmSamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from tests.real.models import tiny_model, tiny_tokenizer
from tests.real.openai_requests import ADD, BASE, CHATS
from tests.support.endpoints import endpoint_spec
from torchtitan_rl.backends.vllm.openai import build_application, handle_errors
from torchtitan_rl.backends.vllm.openai_constraints import (
    ConstraintPolicy,
    constraining_fields,
    readable_calls,
)
from torchtitan_rl.backends.vllm.openai_core import RefusedRequest, RouterCore, generation_request
from torchtitan_rl.channel import Call, End
from torchtitan_rl.errors import EndpointLostError
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import ControllerLink, RequestEnd
from torchtitan_rl.serving.middleware import session_id
from torchtitan_rl.types import Completion, FinishReason, GenerationRequest, Progress, VersionRun


@dataclass
class RecordedLink:
    """A link whose controller says ``batches``."""

    batches: list[list[Progress | RequestEnd]]
    submitted: list[bool] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def submit(self, request: GenerationRequest, *, streams: bool = False) -> None:
        self.submitted.append(streams)

    def abort(self, request_ids: list[str]) -> None:
        self.aborted.extend(request_ids)

    async def next_outputs(self) -> list[Progress | RequestEnd]:
        if not self.batches:
            raise EOFError
        return self.batches.pop(0)


def core_request(request_id: str, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=VllmSamplingParams(**{"logprobs": 1, **params}),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


@st.composite
def completions(draw: st.DrawFn, request_id: str) -> Completion:
    num_tokens = draw(st.integers(0, 12))
    token_ids = tuple(range(100, 100 + num_tokens))
    starts = draw(st.sets(st.integers(1, max(1, num_tokens - 1)), max_size=3))
    starts = {0, *starts} if num_tokens > 1 else ({0} if num_tokens else set())
    logprobs = tuple(-float(token) for token in token_ids)
    return Completion(
        request_id=request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        version_runs=tuple(VersionRun(start, 7 + start) for start in sorted(starts)),
        finish_reason=draw(st.sampled_from(FinishReason)),
        stop_reason=draw(st.sampled_from([None, 5, "stop"])),
        top_logprobs=tuple(
            ((token, logprob), (9, -0.5))
            for token, logprob in zip(token_ids, logprobs, strict=True)
        ),
    )


def progress_of(completion: Completion, start: int, end: int) -> Progress:
    return Progress(
        request_id=completion.request_id,
        start=start,
        token_ids=completion.token_ids[start:end],
        logprobs=completion.logprobs[start:end],
        version_runs=tuple(run for run in completion.version_runs if run.start < end),
        top_logprobs=completion.top_logprobs[start:end],
    )


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[Completion], list[list[Progress | RequestEnd]]]:
    """Completions, and batches that bring them in any split, repeats and gaps included."""
    done = [draw(completions(f"r{n}")) for n in range(draw(st.integers(1, 4)))]
    num_batches = draw(st.integers(1, 5))
    progress: list[list[Progress]] = [[] for _ in range(num_batches)]
    ends: list[list[RequestEnd]] = [[] for _ in range(num_batches)]
    for completion in done:
        last = draw(st.integers(0, num_batches - 1))
        ends[last].append(End(call_id=completion.request_id, result=completion))
        if completion.token_ids:
            for batch in range(last + 1):
                if draw(st.booleans()):
                    start = draw(st.integers(0, len(completion.token_ids) - 1))
                    end = draw(st.integers(start + 1, len(completion.token_ids)))
                    progress[batch].append(progress_of(completion, start, end))
    batches = [[*some, *ended] for some, ended in zip(progress, ends, strict=True)]
    return done, batches


async def outputs_of(core: RouterCore) -> list[Any]:
    outputs = []
    try:
        while True:
            outputs.append(await core.get_output_async())
    except EOFError:
        return outputs


@settings(max_examples=300, deadline=None)
@given(deliveries())
def test_every_token_is_delivered_once_in_order_with_its_logprob_and_version(delivery) -> None:
    done, batches = delivery

    async def play() -> list[Any]:
        core = RouterCore(RecordedLink(batches))  # type: ignore[arg-type]
        for completion in done:
            await core.add_request_async(core_request(completion.request_id))
        return await outputs_of(core)

    outputs = asyncio.run(play())
    for completion in done:
        mine = [
            (batch.weight_version, output)
            for batch in outputs
            for output in batch.outputs
            if output.request_id == completion.request_id
        ]
        tokens = [token for _, output in mine for token in output.new_token_ids]
        assert tuple(tokens) == completion.token_ids
        versions = [int(label or -1) for label, output in mine for _ in output.new_token_ids]
        assert tuple(versions) == completion.versions
        rows = [output.new_logprobs for _, output in mine if output.new_token_ids]
        ids = [row.tolist() for lists in rows for row in lists.logprob_token_ids]
        logprobs = [row.tolist() for lists in rows for row in lists.logprobs]
        assert ids == [[token, 9] for token in completion.token_ids]
        assert logprobs == [[logprob, -0.5] for logprob in completion.logprobs]
        assert [output.finished for _, output in mine] == [False] * (len(mine) - 1) + [True]
        assert str(mine[-1][1].finish_reason) == completion.finish_reason
        assert mine[-1][1].stop_reason == completion.stop_reason


def test_a_stop_string_is_left_to_vllm_to_find_in_the_last_tokens() -> None:
    """Told that the request has stopped, it would leave the last token's text out."""
    completion = Completion(
        request_id="r",
        token_ids=(4, 5),
        logprobs=(-1.0, -1.0),
        version_runs=(VersionRun(0, 0),),
        finish_reason=FinishReason.STOP,
        stop_reason="x",
    )

    async def play() -> list[Any]:
        end = End(call_id="r", result=completion)
        core = RouterCore(RecordedLink([[end]]))  # type: ignore[arg-type]
        await core.add_request_async(core_request("r"))
        return await outputs_of(core)

    outputs = [output for batch in asyncio.run(play()) for output in batch.outputs]
    assert [(output.new_token_ids, output.finished) for output in outputs] == [
        ([4, 5], False),
        ([], True),
    ]


def test_a_refusal_fails_its_request_once_and_what_is_late_is_dropped() -> None:
    failed = []

    async def play() -> tuple[list[Any], list[str]]:
        refusal = RefusedError(503, "lost", "gone")
        ends: list[Any] = [End(call_id="a", error=refusal)]
        link = RecordedLink([ends, ends])
        core = RouterCore(link)  # type: ignore[arg-type]
        core.fail = lambda name, error: failed.append((name, error.http_status, error.refusal.code))
        await core.add_request_async(core_request("a"))
        outputs = await outputs_of(core)
        core.abort(["a", "never"])
        return outputs, link.aborted

    assert asyncio.run(play()) == ([], [])
    assert failed == [("a", 503, "lost")]


def test_only_what_differs_from_vllms_defaults_travels_as_an_option() -> None:
    plain = generation_request(core_request("a", seed=4, top_k=-1)).sampling
    assert plain.engine_options == {}
    assert (plain.top_k, plain.num_logprobs, plain.seed) == (0, 1, 4)
    assert plain.with_logprobs
    bound = VllmSamplingParams(skip_special_tokens=False, logit_bias={5: 1.0}, bad_words=["x"])
    request = core_request("b")
    request.sampling_params = bound
    assert generation_request(request).sampling.engine_options == {
        "logit_bias": {"5": 1.0},
        "bad_words": ["x"],
    }
    bound.stop = ["y"]
    options = generation_request(request).sampling.engine_options
    assert options["skip_special_tokens"] is False


def test_only_streams_are_told_of_progress() -> None:
    link = RecordedLink([])

    async def play() -> None:
        core = RouterCore(link)  # type: ignore[arg-type]
        for name, kind in (("a", RequestOutputKind.DELTA), ("b", RequestOutputKind.FINAL_ONLY)):
            await core.add_request_async(core_request(name, output_kind=kind))

    asyncio.run(play())
    assert link.submitted == [True, False]


def test_a_session_is_that_of_the_headers_or_of_the_body_and_two_are_refused() -> None:
    request = core_request("a")
    assert generation_request(request).session_id is None
    request.session_id = "body"
    assert generation_request(request).session_id == "body"
    token = session_id.set("header")
    try:
        with pytest.raises(VLLMValidationError, match="different sessions"):
            generation_request(request)
        request.session_id = None
        assert generation_request(request).session_id == "header"
    finally:
        session_id.reset(token)


def test_logprobs_are_left_out_where_neither_a_client_nor_a_session_wants_them() -> None:
    request = core_request("a")
    request.sampling_params = VllmSamplingParams()
    assert not generation_request(request).sampling.with_logprobs
    request.session_id = "s"
    assert generation_request(request).sampling.with_logprobs


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RefusedRequest(RefusedError(429, "busy", "later")), 429),
        (EngineDeadError(), 503),
        (EngineGenerateError("of /home/secret"), 500),
        (RuntimeError("of /home/secret"), 500),
        (VLLMValidationError("of /home/secret"), 400),
        (HTTPException(405, "no such method"), 405),
    ],
)
def test_no_error_shows_what_is_inside(error: Exception, status: int) -> None:
    app = FastAPI()
    app.state.args = SimpleNamespace(log_error_stack=False)
    handle_errors(app)

    @app.get("/")
    async def fail() -> None:
        raise error

    answer = TestClient(app, raise_server_exceptions=False).get("/")
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    for inside in ("secret", "Traceback", "EngineCore"):
        assert inside not in answer.text


def test_tools_without_a_parser_are_refused_by_the_name_of_our_option(tmp_path: Path) -> None:
    async def scenario() -> None:
        link = ControllerLink()
        link.attach()
        app = build_application(endpoint_spec(tiny_model(tmp_path), max_model_len=64), link)
        tool = {"name": "add", "parameters": {"type": "object", "properties": {}}}
        body: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
        body |= {"tools": [{"type": "function", "function": tool}], "max_tokens": 4}
        message = {**body, "tools": [{"name": "add", "input_schema": tool["parameters"]}]}
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            for url, asked in (
                ("/v1/chat/completions", body),
                ("/v1/chat/completions", body | {"tool_choice": "required", "stream": True}),
                ("/v1/messages", message),
            ):
                answer = await client.post(url, json=asked)
                assert answer.status_code == 400
                text = answer.json()["error"]["message"]
                assert "tools need endpoint.tool_call_parser" in text
                assert "enable-auto" not in text
        app.state.engine_client.shutdown()

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [None, ZeroDivisionError("a error")])
def test_a_front_end_that_takes_no_outputs_any_more_answers_all_and_fails_its_link(
    tmp_path: Path, error: Exception | None
) -> None:
    async def scenario() -> None:
        link = ControllerLink()
        link.attach()
        app = build_application(endpoint_spec(tiny_model(tmp_path), max_model_len=64), link)
        llm = app.state.engine_client
        llm.start()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            body = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 4}
            waiting = asyncio.create_task(client.post("/v1/completions", json=body))
            (wanted,) = await link.take()
            assert isinstance(wanted, Call)
            if error is None:
                llm.output_handler.cancel()
            else:

                def fail(*_: Any, **__: Any) -> None:
                    raise error

                llm.output_processor.process_outputs = fail
                end = Completion(
                    request_id=str(wanted.call_id),
                    token_ids=(5,),
                    logprobs=(-1.0,),
                    version_runs=(VersionRun(0, 0),),
                    finish_reason=FinishReason.LENGTH,
                )
                link.deliver((End(call_id=wanted.call_id, result=end),))
            assert (await waiting).status_code >= 500
            refused = await client.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                "endpoint_failed",
            )
            assert (await client.get("/health")).status_code == 503
            with pytest.raises(EndpointLostError, match="outputs are no longer taken"):
                await link.take()
        llm.shutdown()
        link.close()

    asyncio.run(scenario())


def test_a_schema_that_xgrammar_lacks_is_refused_by_its_keywords(tmp_path: Path) -> None:
    number = {"type": "integer", "minimum": 0, "multipleOf": 5}
    name = {"type": "string", "pattern": "^a", "maxLength": 3}
    many = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}

    async def scenario() -> None:
        link = ControllerLink()
        link.attach()
        spec = endpoint_spec(tiny_model(tmp_path), max_model_len=64, constraints="constrained")
        app = build_application(spec, link)
        llm = app.state.engine_client
        assert llm.vllm_config.structured_outputs_config.backend == "xgrammar"
        llm.start()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            for part, keywords in (
                (number, "multipleOf"),
                (name, "pattern with maxLength"),
                (many, "uniqueItems"),
            ):
                schema = {"type": "object", "properties": {"x": part}}
                for form in (schema, json.dumps(schema)):
                    body = {
                        "model": "policy",
                        "prompt": [1, 2],
                        "structured_outputs": {"json": form},
                    }
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code == 400
                    assert f"has {keywords}, which is not" in answer.json()["error"]["message"]
        llm.shutdown()
        link.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("case", "field"),
    [
        ("a JSON schema", "response_format"),
        ("a regular expression", "structured_outputs"),
        ("a forced tool", "tool_choice"),
        ("a required tool", "tool_choice"),
        ("logit bias", "logit_bias"),
        ("bad words", "bad_words"),
        ("a stop string after a minimum", "min_tokens"),
        ("no end of sequence", "ignore_eos"),
        ("a tool by itself", "structured_outputs"),
        ("no tool by itself", None),
        ("tools that are forbidden", None),
        ("warm and truncated", None),
        ("penalties", None),
    ],
)
def test_a_request_with_a_constraint_is_refused_by_its_field(case: str, field: str | None) -> None:
    asked = {**BASE, **CHATS[case]}
    request = ChatCompletionRequest(**{**asked, **asked.pop("extra_body", {})})
    policy = ConstraintPolicy("refuse", count=[].append)
    if field is None:
        policy.admit(request)
        return
    with pytest.raises(VLLMValidationError, match=f"^{field} ") as refused:
        policy.admit(request)
    assert refused.value.parameter == field


def test_every_form_of_a_constraint_is_known() -> None:
    tool = {"type": "function", "name": "add", "strict": True, "parameters": {}}
    form = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
    request = ResponsesRequest(
        model="policy",
        input="hi",
        tools=[tool],
        tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False,
        text=form,
    )
    assert set(constraining_fields(request)) == {
        "text.format",
        "tool_choice",
        "tools.strict",
        "parallel_tool_calls",
    }


@pytest.mark.parametrize("num_chunks", [1, 2, 45])
def test_a_streamed_call_that_was_cut_has_only_what_was_written(num_chunks: int) -> None:
    """However its text is divided; vLLM adds ``{}`` where the last chunk has the name."""
    written = '<tool_call>{"name": "add", "arguments"'
    request = ChatCompletionRequest.model_validate({**BASE, "tools": [ADD]})
    parser_class = readable_calls(
        ParserManager.get_parser(tool_parser_name="hermes", enable_auto_tools=True)
    )
    tokenizer = tiny_tokenizer()
    parser = parser_class(tokenizer, request.tools)
    size = -(-len(written) // num_chunks)
    chunks = [written[at : at + size] for at in range(0, len(written), size)]
    found = []
    for chunk in chunks:
        ids = tokenizer.encode(chunk, add_special_tokens=False)
        delta = parser.parse_delta(chunk, ids, request, [1], finished=chunk is chunks[-1])
        found += (delta and delta.tool_calls) or []
    assert [call.function.name for call in found if call.function.name] == ["add"]
    assert "".join(call.function.arguments or "" for call in found) == ""
