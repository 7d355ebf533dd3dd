"""A client for sessions and leased problems, for agents that run elsewhere.

It needs httpx and nothing else of this package: the file can be copied into a worker's image.

    from torchtitan_rl.client import Client

    def solve(lease):
        client = openai.OpenAI(base_url=lease.base_url, api_key=lease.api_key)
        answer = client.chat.completions.create(model=lease.model, messages=[...])
        return 1.0 if is_right(answer, lease.data) else 0.0

    Client("http://trainer:8000/v1", api_key="KEY").work(solve)

`Client` blocks; `AsyncClient` has the same methods for ``await``, and both run the same coroutines.
A request that got no answer, or one that says to try again later, is sent again with the same
``Idempotency-Key``, so that nothing happens twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Self, TypeVar

import httpx

logger = logging.getLogger(__name__)

Answer = dict[str, Any]
_T = TypeVar("_T")  # `Answer`, or an awaitable of it
_Send = Callable[..., _T]

_MAX_WAIT_S = 60.0  # that a lease may wait at the server
_RETRIED = (429, 502, 503, 504)
_MAX_REWARD = 1e30  # that the endpoint takes
_MAX_PAUSE_S = 10.0  # between two attempts


class EndpointError(Exception):
    """The endpoint refused a request: ``status`` of HTTP, ``code`` such as ``session_closed``."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Session(Generic[_T]):
    """An open session. Give ``base_url`` and ``api_key`` to any OpenAI client."""

    session_id: str
    base_url: str
    api_key: str = field(repr=False)
    send: _Send[_T] = field(repr=False)

    def reward(
        self,
        reward: float,
        *,
        response_id: str | None = None,
        choice: int | None = None,
        return_episodes: bool = False,
    ) -> _T:
        """Close the session with its reward. With a ``response_id`` (and a ``choice`` of it) only
        the branch with that response gets the reward, and the session stays open.

        Raises:
            ValueError: the reward is no finite number.
        """
        body = {"reward": _number(reward), "response_id": response_id, "choice": choice}
        return self._post("reward", return_episodes=return_episodes, **body)

    def close(self) -> _T:
        """Close the session without a reward."""
        return self.send("DELETE", f"/sessions/{self.session_id}")

    def read(self) -> _T:
        """Its state and counts."""
        return self.send("GET", f"/sessions/{self.session_id}")

    def _post(self, what: str, **body: Any) -> _T:
        return self.send("POST", f"/sessions/{self.session_id}/{what}", body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(Session[_T]):
    """A problem of a training run, with the session for its requests.

    The lease lasts ``lease_s`` after each request and heartbeat, and ends with the reward.
    """

    model: str
    problem_id: str
    data: Mapping[str, Any]
    lease_s: float

    def heartbeat(self) -> _T:
        """Keep the lease; `EndpointError` ``lease_lost`` where it was lost."""
        return self._post("heartbeat")

    def done(self) -> _T:
        """Give the lease back; the reward comes later, from anyone who knows the session."""
        return self._post("return", outcome="done")

    def failed(self, cause: str = "") -> _T:
        """Give the problem back: another worker may have it."""
        return self._post("return", outcome="failed", cause=cause[:1000])


class AsyncClient:
    """For ``await``. ``http`` is a client of yours, with its proxies and certificates.

    ``base_url`` ends in ``/v1``; without one it is ``OPENAI_BASE_URL``. Without a key it is
    ``TORCHTITAN_RL_API_KEY``. ``patience_s`` is how long to try where the endpoint does not answer,
    for example because its run has not started yet.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        patience_s: float = 60.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        found = base_url or os.environ.get("OPENAI_BASE_URL")
        if not found:
            raise ValueError("give base_url, such as http://127.0.0.1:8000/v1, or OPENAI_BASE_URL")
        self._base_url = found.rstrip("/")
        self._api_key = api_key or os.environ.get("TORCHTITAN_RL_API_KEY", "")
        self._patience_s = patience_s
        self._http: Any = http or self._new_http(timeout=_MAX_WAIT_S + 30.0)

    async def open_session(self, session_id: str | None = None) -> Session[Awaitable[Answer]]:
        """Open a session, under an id of its own unless one is given."""
        opened = await self.send("POST", "/sessions", {"session_id": session_id})
        return self.session(opened["session_id"])

    def session(self, session_id: str) -> Session[Awaitable[Answer]]:
        """A session that is open, for example to give it its reward."""
        return Session(session_id=session_id, **self._connection(session_id))

    async def lease(
        self, *, problem_id: str | None = None, worker: str = "", wait_s: float = 20.0
    ) -> Lease[Awaitable[Answer]] | None:
        """Lease a problem of a training run; None where none came within ``wait_s``."""
        body = {"problem_id": problem_id, "worker": worker, "wait_s": min(wait_s, _MAX_WAIT_S)}
        answer = await self.send("POST", "/problems/lease", body)
        if not answer:
            return None
        names = ("session_id", "model", "problem_id", "data", "lease_s")
        known = {name: answer[name] for name in names}
        return Lease(**known, **self._connection(answer["session_id"]))

    async def work(
        self,
        solve: Callable[[Lease[Awaitable[Answer]]], Awaitable[float | None]],
        *,
        worker: str = "",
        keeps_on: Callable[[], bool] = lambda: True,
    ) -> int:
        """Lease problems and solve them, one after another, while ``keeps_on()``.

        ``solve`` returns the reward, or None where it comes later. What it raises is logged, and
        its problem is given back; so is a reward that is no finite number. It also ends when the
        endpoint has not answered for ``patience_s``, for example as its run has ended. Returns the
        number of problems.

        Raises:
            EndpointError: the endpoint refuses to lease problems, for example to this key.
            httpx.TransportError: the endpoint did not answer the first request.
        """
        number = 0
        while keeps_on():
            try:
                lease = await self.lease(worker=worker)
            except (EndpointError, httpx.TransportError) as error:
                if _endpoint_has_ended(error, number):
                    return number
                raise
            if lease is None:
                continue
            number += 1
            with self._kept(lease), _lost_leases_are_logged(lease):
                try:
                    reward = await _result(solve(lease))
                    reward = None if reward is None else _number(reward)
                except Exception as error:
                    logger.exception("problem %s failed", lease.problem_id)
                    await _result(lease.failed(repr(error)))
                    continue
                await _result(lease.done() if reward is None else lease.reward(reward))
        return number

    async def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """One request, sent again where it got no answer.

        Raises:
            EndpointError: it was refused.
            httpx.TransportError: the endpoint does not answer.
        """
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        content = None
        if body is not None:
            given = {key: value for key, value in body.items() if value is not None}
            content = json.dumps(given).encode()
            headers["Content-Type"] = "application/json"
        ask = partial(
            self._http.request, method, f"{self._base_url}{path}", headers=headers, content=content
        )
        for pause_s in _pauses(self._patience_s):
            with contextlib.suppress(httpx.TransportError):
                response = await _result(ask())
                if response.status_code not in _RETRIED:
                    return _answer(response)
            await _result(self._sleep(pause_s))
        return _answer(await _result(ask()))

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _connection(self, session_id: str) -> dict[str, Any]:
        api_key = f"{self._api_key or 'agent'}:{session_id}"
        return {"base_url": self._base_url, "api_key": api_key, "send": self._session_send}

    async def _beat(self, lease: Lease[Any], pause: Callable[[float], Any]) -> None:
        """Send heartbeats until ``pause`` returns True, or the lease is lost."""
        while not await _result(pause(lease.lease_s / 3)):
            try:
                await _result(lease.heartbeat())
            except EndpointError:
                return
            except httpx.TransportError:
                continue

    # All waiting is done by these; they block in `Client`.

    _new_http: Callable[..., Any] = httpx.AsyncClient
    _sleep: Callable[[float], Any] = staticmethod(asyncio.sleep)

    def _session_send(self, *request: Any) -> Any:
        return self.send(*request)

    @contextlib.contextmanager
    def _kept(self, lease: Lease[Any]) -> Iterator[None]:
        beating = asyncio.ensure_future(self._beat(lease, asyncio.sleep))
        try:
            yield
        finally:
            beating.cancel()


class _Blocking(AsyncClient):
    """Its coroutines never suspend."""

    _new_http = httpx.Client
    _sleep = staticmethod(time.sleep)

    def _session_send(self, *request: Any) -> Any:
        return _run(self.send(*request))

    @contextlib.contextmanager
    def _kept(self, lease: Lease[Any]) -> Iterator[None]:
        is_over = threading.Event()
        beating = self._beat(lease, is_over.wait)
        threading.Thread(target=_run, args=(beating,), name="heartbeats", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()


class Client:
    """`AsyncClient`, blocking."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        patience_s: float = 60.0,
        http: httpx.Client | None = None,
    ) -> None:
        given: Any = http
        self._client = _Blocking(base_url, api_key=api_key, patience_s=patience_s, http=given)

    def open_session(self, session_id: str | None = None) -> Session[Answer]:
        session: Session[Answer] = _run(self._client.open_session(session_id))
        return session

    def session(self, session_id: str) -> Session[Answer]:
        return Session(session_id=session_id, **self._client._connection(session_id))

    def lease(
        self, *, problem_id: str | None = None, worker: str = "", wait_s: float = 20.0
    ) -> Lease[Answer] | None:
        leasing = self._client.lease(problem_id=problem_id, worker=worker, wait_s=wait_s)
        lease: Lease[Answer] | None = _run(leasing)
        return lease

    def work(
        self,
        solve: Callable[[Lease[Answer]], float | None],
        *,
        worker: str = "",
        keeps_on: Callable[[], bool] = lambda: True,
    ) -> int:
        blocking: Any = solve
        number: int = _run(self._client.work(blocking, worker=worker, keeps_on=keeps_on))
        return number

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        answer: Answer = _run(self._client.send(method, path, body))
        return answer

    def close(self) -> None:
        self._client._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _result(found: Any) -> Any:
    """What a blocking call returned, or what an asynchronous one will."""
    return await found if inspect.isawaitable(found) else found


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a blocking client has waited for an event loop")


def _number(reward: Any) -> float:
    """The reward for JSON, from a number of any library.

    Raises:
        ValueError: it is no finite number, or a larger one than the endpoint takes.
    """
    try:
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _MAX_REWARD:
        raise ValueError(f"the reward {reward!r:.200} is no finite number of at most 1e30")
    return number


def _pauses(patience_s: float) -> Iterator[float]:
    """Between attempts, for so long in all."""
    pause_s, end_s = 0.2, time.monotonic() + patience_s
    while time.monotonic() < end_s:
        yield pause_s
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _answer(response: httpx.Response) -> Answer:
    if response.status_code == 204:
        return {}
    try:
        body = response.json()
    except ValueError:
        body = {}
    if response.is_success:
        answer: Answer = body
        return answer
    error = body.get("error", {}) if isinstance(body, dict) else {}
    code = str(error.get("code") or "http_error")
    raise EndpointError(response.status_code, code, str(error.get("message", response.text[:500])))


def _endpoint_has_ended(error: Exception, num_leased: int) -> bool:
    """Whether a worker that has leased problems is done, which is logged."""
    is_gone = isinstance(error, httpx.TransportError) or (
        isinstance(error, EndpointError) and error.status in _RETRIED
    )
    if is_gone and num_leased:
        logger.warning("the endpoint is gone after %d leased problems: %s", num_leased, error)
    return is_gone and num_leased > 0


@contextlib.contextmanager
def _lost_leases_are_logged(lease: Lease[Any]) -> Iterator[None]:
    """A worker goes on where its rollout has ended without it."""
    try:
        yield
    except httpx.TransportError as error:
        logger.warning("problem %s: the endpoint does not answer: %s", lease.problem_id, error)
    except EndpointError as error:
        if error.code not in ("session_closed", "lease_lost"):
            raise
        logger.warning("the lease of problem %s was lost: %s", lease.problem_id, error)
