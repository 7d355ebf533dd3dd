"""The routes of sessions and administration, through all layers of the endpoint."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping
from typing import Any

import pytest
from fastapi import FastAPI

from tests.support.http_driver import Client
from torchtitan_rl.serving.app import EndpointApp
from torchtitan_rl.serving.config import EndpointConfig, Keys
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import CommandName

ADMIN = {"Authorization": "Bearer chief"}
CLIENT = {"Authorization": "Bearer secret"}
CONFIG = EndpointConfig(host="0.0.0.0")
KEYS = Keys(api="secret", admin="chief")


class Controller:
    """Records its commands; refuses everything about the session "gone"."""

    calls: list[tuple[str, dict[str, Any]]]
    lease: dict[str, Any]

    async def command(self, name: CommandName, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self.calls.append((name, dict(arguments)))
        if arguments.get("session_id") == "gone":
            raise RefusedError(404, "no_session", "no such session")
        if name.startswith("session"):
            session_id = arguments.get("session_id", "new")
            return {"session_id": session_id, "state": "open", "episodes": [{"tokens": [1]}]}
        if name == "problem.lease":
            return self.lease
        if name.startswith("problem"):
            return {"session_id": arguments["session_id"]}
        if name == "load":
            return {"version": 4, "replicas": {"r0": 4}, "lost": [], "stall_s": 0.1}
        if name == "versions":
            return {"newest": 3, "replicas": {"r0": 2}, "states": {"r0": "serving"}}
        return {"mode": arguments.get("mode")}


CONTROLLER = Controller()


@functools.cache
def endpoint() -> EndpointApp:
    return EndpointApp(FastAPI(), CONFIG, keys=KEYS, commands=CONTROLLER)


@pytest.fixture(autouse=True)
def controller() -> Controller:
    CONTROLLER.calls, CONTROLLER.lease = [], {}
    return CONTROLLER


def ask(
    method: str, path: str, body: Any = None, headers: Mapping[str, str] = CLIENT
) -> tuple[int | None, Any]:
    raw = b"" if body is None else json.dumps(body).encode()

    async def run() -> tuple[int | None, Any]:
        typed = {**headers, "content-type": "application/json"}
        return await Client(endpoint(), path, method=method, body=raw, headers=typed).answer()

    return asyncio.run(run())


def test_a_reward_closes_a_session_and_returns_its_episodes_where_asked_to(
    controller: Controller,
) -> None:
    status, answer = ask("POST", "/v1/sessions/12/r0/reward", {"reward": 1})
    assert (status, answer) == (200, {"session_id": "12/r0", "state": "open"})
    wanted = {"reward": -0.5, "return_episodes": True}
    _, answer = ask("POST", "/v1/sessions/a/reward", wanted)
    assert answer["episodes"] == [{"tokens": [1]}]
    assert controller.calls == [
        ("session.close", {"session_id": "12/r0", "reward": 1.0}),
        ("session.close", {"session_id": "a", "reward": -0.5}),
    ]


def test_a_reward_with_a_response_goes_to_its_branch(controller: Controller) -> None:
    body = {"reward": 0.25, "response_id": "chatcmpl-1", "choice": 1}
    assert ask("POST", "/v1/sessions/a/reward", body)[0] == 200
    arguments = {"session_id": "a", "reward": 0.25, "response_id": "chatcmpl-1", "choice": 1}
    assert controller.calls == [("session.reward_branch", arguments)]
    assert ask("POST", "/v1/sessions/a/reward", {**body, "choice": -1})[0] == 422


def test_a_problem_is_leased_kept_and_returned(controller: Controller) -> None:
    lease = {"session_id": "run-1", "model": "m", "lease_s": 60.0, "problem_id": "p", "data": {}}
    controller.lease = lease
    assert ask("POST", "/v1/problems/lease", {"worker": "w", "wait_s": 5}) == (200, lease)
    assert ask("POST", "/v1/sessions", {"problem_id": "p"}) == (200, lease)
    assert ask("POST", "/v1/sessions/run-1/heartbeat")[0] == 200
    assert ask("POST", "/v1/sessions/run-1/return", {"outcome": "done"})[0] == 200
    assert controller.calls == [
        ("problem.lease", {"worker": "w", "wait_s": 5.0}),
        ("problem.lease", {"problem_id": "p"}),
        ("problem.heartbeat", {"session_id": "run-1"}),
        ("problem.return", {"session_id": "run-1", "outcome": "done", "cause": ""}),
    ]


def test_without_a_problem_a_lease_has_no_content_and_no_session_is_opened() -> None:
    assert ask("POST", "/v1/problems/lease") == (204, None)
    status, answer = ask("POST", "/v1/sessions", {"problem_id": "p"})
    assert (status, answer["error"]["code"]) == (404, "problem_not_found")
    both = {"problem_id": "p", "session_id": "mine"}
    assert ask("POST", "/v1/sessions", both)[1]["error"]["code"] == "invalid_request"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/problems/lease", {"wait_s": 61}),
        ("/v1/problems/lease", {"wait_s": -1}),
        ("/v1/problems/lease", {"worker": "w" * 129}),
        ("/v1/sessions/a/return", {}),
        ("/v1/sessions/a/return", {"outcome": "lost"}),
        ("/admin/load", {}),
        ("/admin/load", {"path": "/x", "version": 0}),
        ("/admin/load", {"path": "/x", "mode": "now"}),
    ],
)
def test_invalid_leases_and_loads_are_refused(path: str, body: Any, controller: Controller) -> None:
    headers = ADMIN if path.startswith("/admin") else CLIENT
    assert ask("POST", path, body, headers)[0] == 422
    assert controller.calls == []


@pytest.mark.parametrize(
    "body",
    [
        None,
        {"reward": "much"},
        {"reward": 1, "extra": 1},
        {"reward": 1e31},
    ],
)
def test_an_invalid_reward_is_refused_and_closes_nothing(body: Any, controller: Controller) -> None:
    assert ask("POST", "/v1/sessions/a/reward", body)[0] == 422
    assert controller.calls == []


@pytest.mark.parametrize("session_id", ["a b", "ä", "a/../b", ".hidden", "x" * 129])
def test_an_invalid_session_id_is_refused(session_id: str, controller: Controller) -> None:
    for method, path, body in [
        ("POST", "/v1/sessions", {"session_id": session_id}),
        ("POST", f"/v1/sessions/{session_id}/reward", {"reward": 1}),
        ("GET", f"/v1/sessions/{session_id}", None),
        ("DELETE", f"/v1/sessions/{session_id}", None),
    ]:
        status, answer = ask(method, path, body)
        assert (status, answer["error"]["code"]) == (400, "invalid_session_id")
        assert controller.calls == []


def test_administration_passes_the_mode_and_needs_the_admin_key(
    controller: Controller,
) -> None:
    for mode in ("keep", "abort", "wait"):
        answer = ask("POST", f"/admin/pause?mode={mode}", None, ADMIN)
        assert answer == (200, {"mode": mode})
    assert ask("POST", "/admin/resume", None, ADMIN)[0] == 200
    status, versions = ask("GET", "/admin/versions", None, ADMIN)
    assert (status, versions["newest"], versions["replicas"]) == (200, 3, {"r0": 2})
    assert ask("POST", "/admin/pause?mode=stop", None, ADMIN)[0] == 422
    num_calls = len(controller.calls)
    for method, path in [("POST", "/pause"), ("POST", "/resume"), ("GET", "/versions")]:
        assert ask(method, "/admin" + path, None, CLIENT)[0] == 403
    assert len(controller.calls) == num_calls
