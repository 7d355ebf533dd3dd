"""Remembers the calls of runs (`serving.retries`), so that a request that is repeated after its
endpoint's process was lost gets the results of the first time.

When a process is lost, the calls of its runs become *orphans*: those that run continue, and those
that have ended keep their results, because the client may not have got them. A repetition takes one
run of its key: a running one, or else the one that ended last, because its client is the likeliest
to have got nothing. Each call of the repeated run then adopts an orphan with the same payload.

Invariants: a run is taken by one repetition of each process, and an orphan is adopted once. Failed
and aborted calls are forgotten, so they are run again. A lack of memory leads to a refusal (410),
never to a second run within ``keep_s``.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan_rl.aio import loop_s, retrieve
from torchtitan_rl.channel import Call, CallId
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.report import without_prefix
from torchtitan_rl.types import Completion, GenerationRequest, Progress, TokenScores

_VALUE_BYTES = 72  # of a token and its logprob


@dataclass(slots=True, eq=False)
class ClientCall:
    """A request or command of a client. ``call_id`` is None when its end has been sent, and while
    no one waits for the end."""

    call_id: CallId | None
    run: str
    streams: bool
    command: str  # its name; empty for a request
    request_id: str  # of the first time; empty for a command
    payload: bytes  # a digest of the payload
    task: asyncio.Future[Any] = field(init=False)
    pieces: list[Progress] = field(default_factory=list)  # of a stream that may be repeated
    is_orphan: bool = False
    is_aborted: bool = False
    num_values: int = 0  # size of the result that is kept

    @classmethod
    def of(cls, call: Call[Any]) -> ClientCall:
        is_request = isinstance(call.payload, GenerationRequest)
        return cls(
            call_id=call.call_id,
            run=call.run,
            streams=call.streams,
            command="" if is_request else call.payload.name,
            request_id=str(call.call_id) if is_request else "",
            payload=_payload(call) if call.run else b"",
        )


class Runs:
    """All runs of an endpoint. The results of ended runs have at most ``max_values`` tokens and
    other values together (about 72 bytes each); those of the oldest are dropped."""

    def __init__(self, *, keep_s: float = 900.0, max_values: int = 1 << 21) -> None:
        self._keep_s = keep_s
        self._max_values = max_values
        self._calls: dict[str, list[ClientCall]] = {}  # of each run, in the order of their start
        self._ended: OrderedDict[str, float] = OrderedDict()  # runs, with the time of their end
        self._num_values = 0
        self._with_result: OrderedDict[ClientCall, None] = OrderedDict()
        self._orphans: Mapping[str, list[str]] = {}  # by key: runs that can be taken

    def add(self, call: ClientCall) -> None:
        """Remember a call that has started."""
        while self._ended and next(iter(self._ended.values())) < loop_s() - self._keep_s:
            run, _ = self._ended.popitem(last=False)
            for old in self._calls.pop(run):
                self._drop(old)
        if call.run:
            self._calls.setdefault(call.run, []).append(call)
            self._ended.pop(call.run, None)

    def end(self, call: ClientCall, result: Any) -> None:
        """Keep the result of a call that has ended; None: it has failed, or was aborted."""
        calls = self._calls.get(call.run, [])
        if call not in calls:
            return
        call.pieces.clear()
        if result is None:
            calls.remove(call)
        else:
            call.num_values = _num_values(result)
            self._num_values += call.num_values
            self._with_result[call] = None
            while self._num_values > self._max_values:
                self._drop(next(iter(self._with_result)))
        if not calls:
            del self._calls[call.run]
        elif all(one.task.done() for one in calls):
            self._ended[call.run] = loop_s()

    def lose_process(self) -> None:
        """Make orphans of all calls."""
        orphans = defaultdict(list)
        for run, calls in self._calls.items():
            orphans[run.partition("-")[0]].append(run)
            for call in calls:
                call.call_id, call.is_orphan = None, True
        self._orphans = orphans

    def take(self, key: str) -> Mapping[str, str]:
        """Take the run that a request with this key repeats: its name, and what the ids of its
        requests have in common. Empty if there is none."""
        runs = [run for run in self._orphans.get(key, ()) if run in self._calls]
        if not runs:
            return {}
        taken = max(runs, key=lambda run: self._ended.get(run, float("inf")))
        self._orphans[key].remove(taken)
        request_id = next((call.request_id for call in self._calls[taken]), "")
        return {"run": taken, "request_id": without_prefix(request_id)}

    def adopt(self, call: Call[Any]) -> ClientCall | None:
        """Answer ``call`` with an orphan of its run, from now on; None if there is none."""
        orphans = [one for one in self._calls.get(call.run, ()) if one.is_orphan]
        if not orphans:
            return None
        payload = _payload(call)
        found = next((one for one in orphans if one.payload == payload), None)
        if found is not None:
            found.call_id, found.is_orphan = call.call_id, False
        return found

    def running_orphans(self) -> list[ClientCall]:
        """Requests that no repetition has adopted."""
        calls = [call for calls in self._calls.values() for call in calls]
        return [one for one in calls if one.is_orphan and not one.command and not one.task.done()]

    def _drop(self, call: ClientCall) -> None:
        if call not in self._with_result:
            return
        del self._with_result[call]
        self._num_values -= call.num_values
        message = "This request was run, and its answer is no longer kept. It is not run again."
        call.task = asyncio.get_running_loop().create_future()
        call.task.set_exception(RefusedError(410, "answer_gone", message))
        retrieve(call.task)


def _payload(call: Call[Any]) -> bytes:
    """A digest that is equal for equal payloads: the ids of requests differ, and are no part of
    it."""
    payload, known = call.payload, 0
    if isinstance(payload, GenerationRequest):
        known = hash((payload.prompt_token_ids, payload.images))
        payload = replace(payload, request_id="", prompt_token_ids=(), images=())
    return hashlib.blake2b(f"{known} {payload!r}".encode(), digest_size=16).digest()


def _num_values(result: Any) -> int:
    if isinstance(result, Completion):
        scores = result.prompt_scores or TokenScores(logprobs=())
        tops = len(scores.top_ids + scores.top_logprobs) // _VALUE_BYTES
        sizes = map(len, (result.token_ids, scores.logprobs, *result.top_logprobs))
        return tops + sum(sizes)
    if isinstance(result, str):
        return 1 + len(result) // _VALUE_BYTES
    if isinstance(result, Mapping):
        result = list(result.values())
    return sum(map(_num_values, result)) if isinstance(result, list | tuple) else 1
