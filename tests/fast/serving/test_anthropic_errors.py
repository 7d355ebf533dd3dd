"""Errors of `/v1/messages` have Anthropic's shape, whichever layer they come from."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.http_driver import Client
from torchtitan_rl.serving.anthropic_errors import AnthropicErrors
from torchtitan_rl.serving.errors import HttpError, OpenAIErrors


def ask(path: str, status: int) -> tuple[int, Any]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise HttpError(status, "no", code="why", param="field", headers={"x": "y"})

    async def run() -> tuple[int, Any]:
        client = Client(AnthropicErrors(OpenAIErrors(app)), path)
        answer = await client.answer()
        assert client.headers["x"] == "y"
        return answer

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (409, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (503, "api_error"),
    ],
)
def test_an_error_has_its_type_message_and_code(status: int, kind: str) -> None:
    error = {"type": kind, "message": "no", "code": "why", "param": "field"}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        assert ask(path, status) == (status, {"type": "error", "error": error})


def test_other_routes_keep_openais_shape() -> None:
    assert set(ask("/v1/responses", 400)[1]) == {"error"}
