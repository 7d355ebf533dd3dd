"""A client for sessions and leased problems, for agents that run elsewhere.

It needs httpx and nothing else of this package: the file can be copied into a worker's image.

    from torchtitan_rl.client import Client

    def solve(lease):
        client = openai.OpenAI(base_url=lease.base_url, api_key=lease.api_key)
        answer = client.chat.completions.create(model=lease.model, messages=[...])
        return 1.0 if is_right(answer, lease.data) else 0.0

    Client("http://trainer:8000/v1", api_key="KEY").work(solve)

`Client` blocks; `AsyncClient` has the same methods for ``await``. A request that got no answer, or
one that says to try again later, is sent again with the same ``Idempotency-Key``, so that nothing
happens twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
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


class _Connection:
    """What both clients share: address, keys, and the meaning of answers."""

    def __init__(self, base_url: str | None, api_key: str | None) -> None:
        found = base_url or os.environ.get("OPENAI_BASE_URL")
        if not found:
            raise ValueError("give base_url, such as http://127.0.0.1:8000/v1, or OPENAI_BASE_URL")
        self.base_url = found.rstrip("/")
        self.api_key = api_key or os.environ.get("TORCHTITAN_RL_API_KEY", "")

    def request(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """The arguments of httpx' ``request``; they stay the same when it is sent again."""
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        given = {key: value for key, value in (body or {}).items() if value is not None}
        content = json.dumps(given).encode() if body is not None else None
        if content is not None:
            headers["Content-Type"] = "application/json"
        return {
            "method": method,
            "url": f"{self.base_url}{path}",
            "headers": headers,
            "content": content,
        }

    def session(self, session_id: str, send: _Send[_T]) -> Session[_T]:
        return Session(
            session_id=session_id,
            base_url=self.base_url,
            api_key=f"{self.api_key or 'agent'}:{session_id}",
            send=send,
        )

    def lease(self, answer: Answer, send: _Send[_T]) -> Lease[_T] | None:
        if not answer:
            return None
        names = ("model", "problem_id", "data", "lease_s")
        session = self.session(answer["session_id"], send)
        return Lease(
            session_id=session.session_id,
            base_url=session.base_url,
            api_key=session.api_key,
            send=send,
            **{name: answer[name] for name in names},
        )


class Client:
    """Blocking. ``http`` is a client of yours, with its proxies and certificates.

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
        http: httpx.Client | None = None,
    ) -> None:
        self._connection = _Connection(base_url, api_key)
        self._patience_s = patience_s
        self._http = http or httpx.Client(timeout=_MAX_WAIT_S + 30.0)

    def open_session(self, session_id: str | None = None) -> Session[Answer]:
        """Open a session, under an id of its own unless one is given."""
        opened = self.send("POST", "/sessions", {"session_id": session_id})
        return self._connection.session(opened["session_id"], self.send)

    def session(self, session_id: str) -> Session[Answer]:
        """A session that is open, for example to give it its reward."""
        return self._connection.session(session_id, self.send)

    def lease(
        self, *, problem_id: str | None = None, worker: str = "", wait_s: float = 20.0
    ) -> Lease[Answer] | None:
        """Lease a problem of a training run; None where none came within ``wait_s``."""
        body = {"problem_id": problem_id, "worker": worker, "wait_s": min(wait_s, _MAX_WAIT_S)}
        return self._connection.lease(self.send("POST", "/problems/lease", body), self.send)

    def work(
        self,
        solve: Callable[[Lease[Answer]], float | None],
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
                lease = self.lease(worker=worker)
            except (EndpointError, httpx.TransportError) as error:
                if _endpoint_has_ended(error, number):
                    return number
                raise
            if lease is None:
                continue
            number += 1
            with _kept(lease), _lost_leases_are_logged(lease):
                try:
                    reward = solve(lease)
                    reward = None if reward is None else _number(reward)
                except Exception as error:
                    logger.exception("problem %s failed", lease.problem_id)
                    lease.failed(repr(error))
                    continue
                if reward is None:
                    lease.done()
                else:
                    lease.reward(reward)
        return number

    def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """One request, sent again where it got no answer.

        Raises:
            EndpointError: it was refused.
            httpx.TransportError: the endpoint does not answer.
        """
        request = self._connection.request(method, path, body)
        for pause_s in _pauses(self._patience_s):
            with contextlib.suppress(httpx.TransportError):
                response = self._http.request(**request)
                if response.status_code not in _RETRIED:
                    return _answer(response)
            time.sleep(pause_s)
        return _answer(self._http.request(**request))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient:
    """`Client` for ``await``."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        patience_s: float = 60.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        self._connection = _Connection(base_url, api_key)
        self._patience_s = patience_s
        self._http = http or httpx.AsyncClient(timeout=_MAX_WAIT_S + 30.0)

    async def open_session(self, session_id: str | None = None) -> Session[Awaitable[Answer]]:
        opened = await self.send("POST", "/sessions", {"session_id": session_id})
        return self._connection.session(opened["session_id"], self.send)

    def session(self, session_id: str) -> Session[Awaitable[Answer]]:
        return self._connection.session(session_id, self.send)

    async def lease(
        self, *, problem_id: str | None = None, worker: str = "", wait_s: float = 20.0
    ) -> Lease[Awaitable[Answer]] | None:
        body = {"problem_id": problem_id, "worker": worker, "wait_s": min(wait_s, _MAX_WAIT_S)}
        answer = await self.send("POST", "/problems/lease", body)
        return self._connection.lease(answer, self.send)

    async def work(
        self,
        solve: Callable[[Lease[Awaitable[Answer]]], Awaitable[float | None]],
        *,
        worker: str = "",
        keeps_on: Callable[[], bool] = lambda: True,
    ) -> int:
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
            async with _kept_async(lease):
                with _lost_leases_are_logged(lease):
                    try:
                        reward = await solve(lease)
                        reward = None if reward is None else _number(reward)
                    except Exception as error:
                        logger.exception("problem %s failed", lease.problem_id)
                        await lease.failed(repr(error))
                        continue
                    await (lease.done() if reward is None else lease.reward(reward))
        return number

    async def send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        request = self._connection.request(method, path, body)
        for pause_s in _pauses(self._patience_s):
            with contextlib.suppress(httpx.TransportError):
                response = await self._http.request(**request)
                if response.status_code not in _RETRIED:
                    return _answer(response)
            await asyncio.sleep(pause_s)
        return _answer(await self._http.request(**request))

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


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


@contextlib.contextmanager
def _kept(lease: Lease[Answer]) -> Iterator[None]:
    """Sends heartbeats from a thread until it is left, or the lease is lost."""
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.wait(lease.lease_s / 3):
            try:
                lease.heartbeat()
            except EndpointError:
                return
            except httpx.TransportError:
                continue

    threading.Thread(target=beat, name="heartbeats", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


@contextlib.asynccontextmanager
async def _kept_async(lease: Lease[Awaitable[Answer]]) -> AsyncIterator[None]:
    async def beat() -> None:
        while True:
            await asyncio.sleep(lease.lease_s / 3)
            with contextlib.suppress(httpx.TransportError):
                await lease.heartbeat()

    beating = asyncio.ensure_future(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


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
