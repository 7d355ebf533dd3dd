"""Requests drawn from the endpoint's own OpenAPI document, and what an answer must never be.

Three kinds: data that fit the document, data that do not (both as schemathesis makes them, and
merged into a small request that is served), and a served request with one property of the
document at a time, since of many random options one is always refused.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

TIMEOUT_S = 300.0  # of one request; a hang is one that takes longer
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = {"model": "policy", "prompt": "hi", "max_tokens": 4}
RESPONSE = {"model": "policy", "input": "hi", "max_output_tokens": 4}
MESSAGE = CHAT  # its fields are the same
SERVED = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": RESPONSE,
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": {name: MESSAGE[name] for name in ("model", "messages")},
    "/tokenize": {"model": "policy", "prompt": "hi"},
    "/detokenize": {"model": "policy", "tokens": [1, 2]},
}
STREAMED = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
LAST_EVENTS = {"response.completed", "message_stop"}


@dataclass
class Target:
    """A server, and what it has answered so far."""

    url: str
    key: str
    admin_key: str
    statuses: Counter[int] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)

    def headers(self, path: str = "") -> dict[str, str]:
        is_admin = path.startswith("/admin")
        return {"Authorization": f"Bearer {self.admin_key if is_admin else self.key}"}

    def document(self) -> dict[str, Any]:
        answer = requests.get(f"{self.url}/openapi.json", headers=self.headers(), timeout=TIMEOUT_S)
        return dict(answer.json())

    def post(self, path: str, body: Any) -> requests.Response:
        """Ask and judge the answer."""
        try:
            answer = requests.post(
                self.url + path, json=body, headers=self.headers(path), timeout=TIMEOUT_S
            )
        except requests.RequestException as error:
            self.errors.append(f"{error!r} to {path} {json.dumps(body)[:500]}")
            raise
        self.judge(answer, f"{path} {json.dumps(body)[:500]}")
        return answer

    def judge(self, answer: Any, request: str) -> None:
        """``answer`` is of requests or of schemathesis."""
        self.statuses[answer.status_code] += 1
        message = fault_of(answer)
        if message:
            said = f"{answer.status_code} {answer.text[:300]!r}"
            self.errors.append(f"{message}: {said} to {request}")


def fault_of(answer: Any) -> str:
    """What is wrong with an answer that must never be given; empty for one that may."""
    if answer.status_code >= 500:
        return "a server error"
    if answer.status_code >= 400 and answer.request.method != "HEAD":
        try:
            error = answer.json()["error"]
            is_object = {"message", "type", "param", "code"} <= set(error)
        except (ValueError, KeyError, TypeError):
            is_object = False
        if not is_object:
            return "no OpenAI error object"
    if "Traceback" in answer.text or '.py"' in answer.text:
        return "a stack trace"
    if "text/event-stream" in str(answer.headers.get("content-type")):
        return _error_of_stream(answer.text)
    return ""


def _error_of_stream(text: str) -> str:
    events = [
        line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")
    ]
    said = [json.loads(event) for event in events if event != "[DONE]"]
    errors = [event for event in said if "error" in event or event.get("type") == "error"]
    if errors:
        return f"an error within a stream: {str(errors[0])[:300]}"
    has_end = events and (events[-1] == "[DONE]" or said[-1].get("type") in LAST_EVENTS)
    return "" if has_end else "a stream without an end"


def fuzz(
    target: Target, document: dict[str, Any], path: str, method: str, *, num_examples: int
) -> None:
    """``num_examples`` requests of each kind to one route, always the same ones."""
    for mode in GenerationMode:
        _fuzz(target, document, path, method, mode, num_examples, served=SERVED.get(path))
    if path in SERVED:
        reduced = one_at_a_time(document, path)
        _fuzz(target, reduced, path, method, GenerationMode.POSITIVE, num_examples)


def _fuzz(
    target: Target,
    document: dict[str, Any],
    path: str,
    method: str,
    mode: GenerationMode,
    num_examples: int,
    *,
    served: dict[str, Any] | None = None,
) -> None:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=target.url)
    cases = schema[path][method].as_strategy(generation_mode=mode)

    @settings(
        max_examples=num_examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def ask(data: Any) -> None:
        case = data.draw(cases)
        if served is not None and isinstance(case.body, dict) and data.draw(st.integers(0, 3)):
            case.body = served | _some_of(case.body, data)
        if path in STREAMED and isinstance(case.body, dict) and data.draw(st.booleans()):
            case.body = {**case.body, "stream": True}
        _call(target, case, path)

    try:
        ask()
    except Unsatisfiable:
        # A route without parameters takes no data that do not fit.
        assert mode is GenerationMode.NEGATIVE


def one_at_a_time(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The document, with a served request and one property more as what ``path`` takes."""
    changed = copy.deepcopy(document)
    media = changed["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    fixed = {name: {"const": value} for name, value in SERVED[path].items()}
    whole = _resolved(changed, media["schema"])
    media["schema"] = {
        "anyOf": [
            {
                "type": "object",
                "properties": fixed | {name: schema},
                "required": list(fixed | {name: schema}),
                "additionalProperties": False,
            }
            for part in whole.get("anyOf", [whole])
            for name, schema in _resolved(changed, part)["properties"].items()
        ]
    }
    return changed


def _resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def _some_of(body: dict[str, Any], data: Any) -> dict[str, Any]:
    names = [name for name in body if name != "model"]
    if not names:
        return {}
    drawn = data.draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    return {name: body[name] for name in drawn}


def _call(target: Target, case: Any, path: str) -> None:
    request = case.as_curl_command()[:700]
    try:
        answer = case.call(headers=target.headers(path), timeout=TIMEOUT_S)
    except (requests.exceptions.InvalidHeader, UnicodeError):
        return  # it cannot be sent
    except requests.RequestException as error:
        target.errors.append(f"{error!r} to {request}")
        raise
    target.judge(answer, request)
    if path == "/admin/pause":
        target.post("/admin/resume", None)
