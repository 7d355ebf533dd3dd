"""Keys, and the session of a request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.http_driver import CHAT, Client
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.serving import context
from torchtitan_rl.serving.address import Keys, is_loopback
from torchtitan_rl.serving.auth import Authentication, is_open, is_session_id
from torchtitan_rl.serving.errors import HttpError, OpenAIErrors

OPEN = {"host": "127.0.0.1", "keys": Keys()}
LOCKED = {"host": "0.0.0.0", "keys": Keys(api="secret", admin="chief")}


def ask(keys: dict[str, Any], headers: Any = (), path: str = CHAT) -> tuple[Any, Any]:
    """``(200, the session it was let in with)`` or ``(status, code)``."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        answer = HttpError(200, str(context.session_id.get()), code="in")
        await answer.response()(scope, receive, send)

    async def run() -> tuple[Any, Any]:
        client = Client(OpenAIErrors(Authentication(app, **keys)), path, headers=headers)
        status, body = await client.answer()
        if status == 401:
            assert client.headers["www-authenticate"] == "Bearer"
        return status, body["error"]["message" if status == 200 else "code"]

    return asyncio.run(run())


def bearer(token: str | bytes) -> dict[str, bytes]:
    return {"Authorization": b"Bearer " + (token.encode() if isinstance(token, str) else token)}


def test_a_loopback_address_without_a_key_takes_any_request() -> None:
    assert ask(OPEN) == (200, "None")
    assert ask(OPEN, bearer("whatever")) == (200, "None")


def test_a_configured_key_is_required_also_on_loopback() -> None:
    keys = {**OPEN, "keys": Keys(api="secret")}
    assert ask(keys, bearer("secret")) == (200, "None")
    assert ask(keys) == (401, "invalid_api_key")
    for wrong in ("Secret", "secre", "secrets", ""):
        assert ask(keys, bearer(wrong)) == (401, "invalid_api_key")
    assert ask(keys, {"Authorization": "Basic secret"}) == (401, "invalid_api_key")
    assert ask(keys, {"Authorization": "secret"}) == (401, "invalid_api_key")
    assert ask(keys, {"Authorization": "bearer secret"}) == (200, "None")


@pytest.mark.parametrize("token", [b"\xff\xfe", "sécret".encode(), "秘密".encode(), b"\x00"])
def test_tokens_that_are_not_ascii_are_refused_and_do_not_crash(token: bytes) -> None:
    assert ask(LOCKED, bearer(token)) == (401, "invalid_api_key")
    assert ask(LOCKED, bearer(token), "/admin/pause") == (403, "not_admin")


def test_a_key_that_is_not_ascii_is_compared_as_utf_8() -> None:
    keys = {**LOCKED, "keys": Keys(api="schlüssel")}
    assert ask(keys, bearer("schlüssel")) == (200, "None")
    assert ask(keys, bearer("schlussel")) == (401, "invalid_api_key")


def test_only_a_get_of_health_is_open() -> None:
    assert is_open({"path": "/health", "method": "GET"})
    assert not is_open({"path": "/health", "method": "POST"})
    for path in ("/health", "/metrics", "/openapi.json", "/v1/models", "/health/", "//health", "/"):
        assert path == "/health" or not is_open({"path": path, "method": "GET"})
        assert ask(LOCKED, path=path) == (401, "invalid_api_key")


def test_the_session_is_named_by_the_header_or_by_what_follows_the_key() -> None:
    assert ask(LOCKED, {**bearer("secret"), "X-Session-ID": "12/r0"}) == (200, "12/r0")
    assert ask(LOCKED, bearer("secret:12/r0")) == (200, "12/r0")
    assert ask(OPEN, bearer("EMPTY:12/r0")) == (200, "12/r0")
    assert ask(OPEN, {"X-Session-ID": "12/r0"}) == (200, "12/r0")
    assert ask(LOCKED, bearer("secret:a:b")) == (200, "a:b")


def test_two_names_for_the_session_must_agree() -> None:
    assert ask(OPEN, {**bearer("k:a"), "X-Session-ID": "a"}) == (200, "a")
    assert ask(OPEN, {**bearer("k:a"), "X-Session-ID": "b"}) == (400, "session_conflict")


@pytest.mark.parametrize("name", ["", "a b", "ä", "-a", "a/../b", "a//b", "a/", "x" * 129, "a\n"])
def test_a_session_id_that_could_not_be_part_of_a_path_is_refused(name: str) -> None:
    assert not is_session_id(name)
    assert ask(OPEN, {"X-Session-ID": name}) == (400, "invalid_session_id")
    if name.strip() == name:
        assert ask(OPEN, bearer("k:" + name)) == (400, "invalid_session_id")


def test_a_wrong_key_is_refused_before_its_session_is_checked() -> None:
    assert ask(LOCKED, bearer("wrong:a b")) == (401, "invalid_api_key")


def test_a_repeated_authorization_header_is_refused() -> None:
    twice = [("Authorization", "Bearer secret"), ("Authorization", "Bearer other")]
    assert ask(LOCKED, twice) == (400, "repeated_header")


def test_the_session_of_one_request_is_not_that_of_the_next() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(context.session_id.get())

    async def run() -> None:
        guarded = Authentication(app, **OPEN)
        for name in ("a", "b"):
            scope = {"type": "http", "path": CHAT, "headers": [(b"x-session-id", name.encode())]}
            await guarded(scope, None, None)  # type: ignore[arg-type]
            seen.append(context.session_id.get())

    asyncio.run(run())
    assert seen == ["a", None, "b", None]


@pytest.mark.parametrize("path", ["/admin/pause", "/admin/resume", "/admin/versions", "/admin"])
def test_the_admin_key_opens_the_admin_routes_and_nothing_else(path: str) -> None:
    assert ask(LOCKED, bearer("chief")) == (401, "invalid_api_key")
    assert ask(LOCKED, bearer("chief"), path) == (200, "None")
    assert ask(LOCKED, bearer("secret"), path) == (403, "not_admin")
    assert ask(LOCKED, bearer("chief:a"), path) == (403, "not_admin")
    assert ask(LOCKED, path=path) == (401, "invalid_api_key")


def test_without_an_admin_key_there_are_no_admin_routes() -> None:
    for headers in ({}, bearer(""), bearer("anything")):
        assert ask(OPEN, headers, "/admin/pause") == (404, "no_admin")


def test_an_address_that_others_reach_needs_a_key_and_keys_must_be_usable() -> None:
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.org", ""):
        assert "TORCHTITAN_RL_API_KEY" in Keys().errors(host)[0]
        assert Keys(api="secret").errors(host) == []
        with pytest.raises(ConfigError):
            Authentication(None, host=host, keys=Keys())  # type: ignore[arg-type]
    for host in ("127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost"):
        assert is_loopback(host)
        assert Keys().errors(host) == []
    assert ":" in Keys(api="a:b").errors("127.0.0.1")[0]
    assert "differ" in Keys(api="same", admin="same").errors("127.0.0.1")[0]


def test_the_key_of_anthropics_clients_is_taken_where_there_is_no_bearer_token() -> None:
    assert ask(LOCKED, {"x-api-key": "secret:s1"}) == (200, "s1")
    assert ask(LOCKED, {"x-api-key": "wrong"}) == (401, "invalid_api_key")
    assert ask(LOCKED, {**bearer("wrong"), "x-api-key": "secret"}) == (401, "invalid_api_key")
