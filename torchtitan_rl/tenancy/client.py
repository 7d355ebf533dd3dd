"""A replica behind a URL: a run's place on the engines of ``torchtitan-rl serve --tenants``.

`ServedPeer` carries the messages of a `ConnectedReplica` over HTTP. Batches of calls are posted;
batches of progress and ends are asked for, and answered once there are some. Batches are numbered,
so a request that fails is sent again. If the server was not reached for `LOST_S`, the replica is
lost, as if its processes had died; the run starts it again by registering again.

Invariant: no command waits for a request, and each batch of calls is taken whole, once, or not at
all.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from torchtitan_rl.aio import cancel_all, deadline, loop_s, retrieve
from torchtitan_rl.channel import CallId, End, Outbox
from torchtitan_rl.config.lora import LoraConfig
from torchtitan_rl.errors import OutputError, ReplicaError, one_line
from torchtitan_rl.generation.commands import AbortRequests
from torchtitan_rl.generation.server import FromReplica, ToReplica
from torchtitan_rl.routing.continuation import reported
from torchtitan_rl.tenancy.messages import (
    LEASE_HEADER,
    PART_BYTES,
    PREFIX,
    WAIT_S,
    decode_ends,
    encode_calls,
    is_answer,
)
from torchtitan_rl.types import GenerationRequest
from torchtitan_rl.weights.distribution import (
    SharedMemoryHandle,
    WeightDistribution,
    WeightHandle,
)

logger = logging.getLogger(__name__)

API_KEY = "TORCHTITAN_RL_GENERATOR_KEY"
OWNER_FILE = "tenant"  # in the folder of a run
LOST_S = 30.0
_ANSWER_S = 2 * WAIT_S
_STAGE_S = 900.0
_BEAT_S = 10.0
_PAUSE_S = 0.5
_RETRIED = (408, 425, 429, 502, 503, 504)


class ServedPeer:
    """See `ReplicaPeer`. The trainer is on this machine.

    Args:
        url: the server's base URL, such as ``http://host:8000/v1``.
        tenant: the run's name on the server; ``owner`` tells this run from others of that name.
        policy: digest of the policy on which the adapter is trained (`policy_digest`).
        weights: what the trainer has published.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        tenant: str,
        owner: str,
        policy: str,
        lora: LoraConfig,
        max_model_len: int,
        weights: WeightDistribution,
    ) -> None:
        self.name = name
        self._weights = weights
        self._url = url
        own = {"owner": owner, "policy": policy, "max_model_len": max_model_len}
        self._registration = {**own, **asdict(lora)}
        self._path = f"{PREFIX.rpartition('/')[2]}/{tenant}"
        headers = {"Accept-Encoding": "identity"}
        if key := os.environ.get(API_KEY, ""):
            headers["Authorization"] = f"Bearer {key}"
        self._http = httpx.AsyncClient(
            base_url=f"{url.rstrip('/')}/",
            headers=headers,
            timeout=None,  # each request has a deadline of its own
            trust_env=False,
        )
        self._outbox: Outbox[ToReplica] = Outbox()
        self._sending: asyncio.Task[None] | None = None
        self._num_sent = self._num_received = 0
        self._aborted: list[FromReplica] = []  # ends of requests that were not sent
        self._commands: dict[CallId, object] = {}  # the running ones

    async def start(self, *, patience_s: float = 0.0) -> None:
        """Register the run. A server that is not reached is asked again for ``patience_s``; raises
        as `_ask` does."""
        registration = self._registration
        answer = await self._ask("POST", self._path, patience_s=patience_s, json=registration)
        self._http.headers[LEASE_HEADER] = answer.json()["lease"]
        self._sending = asyncio.create_task(self._send_all(), name=f"to {self.name}")
        self._sending.add_done_callback(retrieve)

    def send(self, messages: tuple[ToReplica, ...]) -> None:
        for one in messages:
            if isinstance(one.call_id, int):
                self._commands[one.call_id] = one.payload
        self._outbox.put(*messages)

    async def _send_all(self) -> None:
        """Send requests once the server has room for them. Commands do not wait behind them."""
        waiting: dict[CallId, ToReplica] = {}
        is_full = has_told = False
        while True:
            wait_s = _BEAT_S if not waiting else _PAUSE_S if is_full else 0.0
            ordered = []
            for call in await self._outbox.take(wait_s):
                if isinstance(call.payload, GenerationRequest):
                    waiting[call.call_id] = call
                    continue
                ordered.append(call)
                if isinstance(call.payload, AbortRequests):
                    names = [one for one in call.payload.request_ids if waiting.pop(one, None)]
                    self._aborted += [End(call_id=one, result=reported(one, ())) for one in names]
            if ordered or not waiting:  # without calls the lease goes on
                for _, content in encode_calls(ordered):
                    await self._post(content)
            if not waiting:
                continue
            tried = islice(waiting.values(), 1 if is_full else None)
            number, content = next(encode_calls(tried))
            is_full = not await self._post(content)
            if not is_full:
                for one in list(islice(waiting, number)):
                    del waiting[one]
            elif not has_told:
                has_told = True
                message = "%s has no room for more requests of %s; %d wait for the end of some"
                logger.warning(message, self._url, self.name, len(waiting))

    async def _post(self, content: bytes) -> bool:
        """Send a batch of calls. Returns whether the server takes it."""
        self._num_sent += 1
        params = {"number": self._num_sent}
        answer = await self._ask("POST", f"{self._path}/messages", params=params, content=content)
        try:
            return bool(answer.json()["is_taken"])
        except (KeyError, ValueError, TypeError) as error:
            raise self._misanswered(error) from error

    async def receive(self) -> tuple[FromReplica, ...]:
        sending = self._sending
        if sending is None:
            raise ReplicaError(f"{self.name} is not registered")
        if sending.done():
            sending.result()
        if self._aborted:
            ends, self._aborted = tuple(self._aborted), []
            return ends
        params = {"after": self._num_received}
        answer = await self._ask("GET", f"{self._path}/messages", params=params)
        try:
            self._num_received = int(answer.headers["x-batch"])
            messages = decode_ends(answer.content)
            for one in messages:
                if isinstance(one, End) and isinstance(one.call_id, int):
                    command = self._commands.pop(one.call_id)
                    if one.error is None and not is_answer(one.result, command):
                        raise ValueError(f"{one.result!r} for {command!r}")
            return messages
        except (KeyError, ValueError) as error:
            raise self._misanswered(error) from error

    def _misanswered(self, error: Exception) -> ReplicaError:
        return ReplicaError(f"{self._url} sent an answer of another kind: {error!r}")

    async def stage(self, handle: WeightHandle) -> None:
        """Upload a version, and have the server's engines load it.

        Raises:
            SourceLostError: the trainer is lost.
            WeightSyncError: the version is gone.
            ReplicaError: the server is lost, or refuses the version.
        """
        await self._weights.read(handle, 0, self._upload)  # from the trainer, on this machine

    async def _upload(self, handle: SharedMemoryHandle) -> None:
        content = await asyncio.to_thread(_read, handle)
        path = f"{self._path}/versions/{handle.version}"
        for offset in range(0, len(content), PART_BYTES):
            part = content[offset : offset + PART_BYTES]
            await self._ask("PUT", path, params={"offset": offset}, content=part)
        await self._ask("POST", path, timeout_s=_STAGE_S)

    async def close_loop(self, *, is_lost: bool) -> None:
        if not is_lost and self._sending is not None:
            with suppress(httpx.HTTPError, TimeoutError):  # the lease ends by itself
                async with asyncio.timeout(_ANSWER_S):
                    await self._http.delete(self._path)

    async def close(self) -> None:
        await cancel_all([] if self._sending is None else [self._sending])
        await self._http.aclose()

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float = _ANSWER_S,
        patience_s: float = LOST_S,
        **content: Any,
    ) -> httpx.Response:
        """Send a request until it is answered. What the server takes twice has no effect.
        ReplicaError: the server refuses it, or was not reached for ``patience_s``."""
        give_up_s = loop_s() + patience_s
        while True:
            try:
                async with deadline(timeout_s):
                    answer = await self._http.request(method, path, **content)
                if answer.status_code == httpx.codes.OK:
                    return answer
                message = f"{self._url} refuses {self.name}: {_cause(answer)}"
                if answer.status_code not in _RETRIED:
                    raise ReplicaError(message)
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
                cause = one_line(error) or type(error).__name__
                message = f"no `torchtitan-rl serve --tenants` is reached at {self._url}: {cause}"
            if loop_s() > give_up_s:
                raise ReplicaError(message)
            await asyncio.sleep(_PAUSE_S)


def owner_of(run_dir: Path) -> str:
    """The secret by which a server knows the next process of a run, from a file in its folder that
    only this user can read, which is made if need be. OutputError: it cannot be."""
    path = run_dir / OWNER_FILE
    try:
        with suppress(FileNotFoundError):
            if owner := path.read_text():
                return owner
        owner = secrets.token_hex(16)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(owner)
    except (OSError, UnicodeDecodeError) as error:
        raise OutputError(f"{path}: {error}") from error
    return owner


def _cause(answer: httpx.Response) -> str:
    try:
        error: Mapping[str, Any] = answer.json()["error"]
        is_key = answer.status_code == httpx.codes.UNAUTHORIZED
        fix = f"; the key is read from {API_KEY}" if is_key else ""
        return f"{error['message']} (HTTP {answer.status_code}){fix}"
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


def _read(handle: SharedMemoryHandle) -> bytes:
    """A version as a safetensors file."""
    from safetensors.torch import save

    from torchtitan_rl.weights.shm import WeightStaging

    staging = WeightStaging()
    staging.stage(handle)
    return bytes(save(dict(staging.tensors(handle.version))))
