"""A client for sessions and leased problems, for agents that run elsewhere.

It needs httpx and nothing else of this package: the file can be copied into a worker's image.

    from torchtitan_rl.client import Client

    def solve(lease):
        client = openai.OpenAI(base_url=lease.base_url, api_key=lease.api_key)
        answer = client.chat.completions.create(model=lease.model, messages=[...])
        return 1.0 if is_right(answer, lease.data) else 0.0

    Client("http://trainer:8000/v1", api_key="KEY").work(solve)

`Client` blocks; `AsyncClient` has the same methods for ``await``, and both run the same coroutines.
A request without an answer, or whose answer says to try again later, is sent again with the same
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

_MAX_WAIT_S = 60.0  # the longest time for which the server holds a request for a lease
_RETRIED = (429, 502, 503, 504)
_MAX_REWARD = 1e30  # the largest reward that the endpoint accepts
_MAX_PAUSE_S = 10.0  # between two attempts


class EndpointError(Exception):
    """The endpoint refused a request: the HTTP ``status``, and a ``code`` such as
    ``session_closed``."""

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
        """Close the session with its reward.

        With a ``response_id`` (and the number of one of its choices in ``choice``), only the branch
        with that response gets the reward, and the session stays open.

        Raises:
            ValueError: the reward is not a finite number of at most 1e30.
        """
        body = {"reward": _number(reward), "response_id": response_id, "choice": choice}
        return self._post("reward", return_episodes=return_episodes, **body)

    def close(self) -> _T:
        """Close the session without a reward."""
        return self.send("DELETE", f"/sessions/{self.session_id}")

    def read(self) -> _T:
        """Return the session's state and counts."""
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
        """Extend the lease. If it was lost, this raises `EndpointError` with ``lease_lost``."""
        return self._post("heartbeat")

    def done(self) -> _T:
        """Give the lease back without a reward. Any client that has the session may report the
        reward later."""
        return self._post("return", outcome="done")

    def failed(self, cause: str = "") -> _T:
        """Give the problem back, so that another worker may lease it."""
        return self._post("return", outcome="failed", cause=cause[:1000])


class AsyncClient:
    """The asynchronous client. ``http`` is your own httpx client, for example with proxies and
    certificates.

    ``base_url`` ends in ``/v1`` (default: the environment variable ``OPENAI_BASE_URL``).
    ``api_key`` defaults to ``TORCHTITAN_RL_API_KEY``. ``patience_s`` is how long to repeat a
    request that the endpoint does not answer, for example because its run has not started yet.
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
        """Open a session; the endpoint chooses its id if ``session_id`` is None."""
        opened = await self.send("POST", "/sessions", {"session_id": session_id})
        return self.session(opened["session_id"])

    def session(self, session_id: str) -> Session[Awaitable[Answer]]:
        """Return an open session by its id, for example to report its reward."""
        return Session(session_id=session_id, **self._connection(session_id))

    async def lease(
        self, *, problem_id: str | None = None, worker: str = "", wait_s: float = 20.0
    ) -> Lease[Awaitable[Answer]] | None:
        """Lease a problem of a training run; None if no problem was available within ``wait_s``."""
        body = {"problem_id": problem_id, "worker": worker, "wait_s": min(wait_s, _MAX_WAIT_S)}
        answer = await self.send("POST", "/problems/lease", body)
        if not answer:
            return None
        names = ("session_id", "model", "problem_id", "data", "lease_s")
        connection = self._connection(answer["session_id"])
        return Lease(**connection, **{name: answer[name] for name in names})

    async def work(
        self,
        solve: Callable[[Lease[Awaitable[Answer]]], Awaitable[float | None]],
        *,
        worker: str = "",
        keeps_on: Callable[[], bool] = lambda: True,
    ) -> int:
        """Lease problems and solve them, one after another, while ``keeps_on()`` returns True, or
        until the endpoint has not answered for ``patience_s``, because the run has ended. Returns
        the number of leased problems, failed ones included.

        ``solve`` returns the reward, or None if it will be reported later through the session. If
        it raises, or the reward is not a finite number, the error is logged and the problem is
        given back.

        Raises:
            EndpointError: the endpoint refuses to lease problems, for example to this key.
            httpx.TransportError: the endpoint did not answer, and no problem was leased before.
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
        """Send one request; without an answer, it is sent again for ``patience_s``. Raises
        EndpointError: the endpoint refused the request; or httpx.TransportError: no answer."""
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

    # Everything that waits; `_Blocking` replaces these by functions that block.

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
    """An `AsyncClient` whose coroutines block instead of suspending; `_run` runs them."""

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
    """Return the result of a blocking call, or await that of an asynchronous call."""
    return await found if inspect.isawaitable(found) else found


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never suspends, and return its result."""
    try:
        work.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("a blocking client has waited for an event loop")


def _number(reward: Any) -> float:
    """Convert a reward, a number of any library, to a float; ValueError if it is not finite or
    larger than the endpoint accepts."""
    try:
        number = math.nan if isinstance(reward, str | bytes) else float(reward)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _MAX_REWARD:
        raise ValueError(f"the reward {reward!r:.200} is no finite number of at most 1e30")
    return number


def _pauses(patience_s: float) -> Iterator[float]:
    """Yield the pauses between attempts, until ``patience_s`` have passed."""
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
    """Whether the endpoint is gone after this worker leased problems. Logs this."""
    is_gone = not isinstance(error, EndpointError) or error.status in _RETRIED
    if is_gone and num_leased:
        logger.warning("the endpoint is gone after %d leased problems: %s", num_leased, error)
    return is_gone and num_leased > 0


@contextlib.contextmanager
def _lost_leases_are_logged(lease: Lease[Any]) -> Iterator[None]:
    """Log a lost lease instead of raising, so that the worker continues with the next problem."""
    try:
        yield
    except httpx.TransportError as error:
        logger.warning("problem %s: the endpoint does not answer: %s", lease.problem_id, error)
    except EndpointError as error:
        if error.code not in ("session_closed", "lease_lost"):
            raise
        logger.warning("the lease of problem %s was lost: %s", lease.problem_id, error)
