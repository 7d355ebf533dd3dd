"""The messages between a run and the `torchtitan-rl serve` whose engines it uses, as bytes
(msgpack): those of a replica's channel (`generation.server`). Decoding checks all types and runs no
code, because the other side may be another user's program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import NoneType
from typing import Annotated, Any

import msgspec

from torchtitan_rl.channel import Call, CallId, End
from torchtitan_rl.errors import (
    GenerationError,
    GenerationTimeoutError,
    InvalidRequestError,
    ReplicaError,
)
from torchtitan_rl.generation import commands
from torchtitan_rl.generation.server import FromReplica, ToReplica
from torchtitan_rl.types import (
    Completion,
    EngineReading,
    EngineStats,
    GenerationRequest,
    Progress,
    PullReport,
)

PREFIX = "/v1/tenants"
LEASE_HEADER = "x-tenant-lease"
PART_BYTES = 4 << 20  # of an uploaded adapter, in one request
LEASE_S = 60.0  # after this time without a sign of the run, its place is free
BATCH_BYTES = 1 << 20  # of calls, in one request
BATCH_CALLS = 8192  # in one request
WAIT_S = 5.0  # how long the server keeps a request for messages that are not there yet


class _Message(msgspec.Struct, frozen=True):
    """``kind`` is the name of the type of ``payload``: of a call's or a result, or `Progress`. An
    error's payload is its text."""

    kind: str
    call_id: CallId
    payload: msgspec.Raw
    streams: bool = False


def _decoders(*kinds: type) -> dict[str, msgspec.msgpack.Decoder[Any]]:
    return {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in kinds}


_ERRORS: dict[str, type[GenerationError]] = {
    kind.__name__: kind
    for kind in (GenerationTimeoutError, InvalidRequestError, ReplicaError, GenerationError)
}
_CALLS = _decoders(
    GenerationRequest,
    commands.AbortRequests,
    commands.Pull,
    commands.Pause,
    commands.Resume,
    commands.ReadTokens,
    commands.ReadStats,
)
_ENDS = _decoders(Progress, Completion, PullReport, EngineReading, EngineStats, NoneType)
_ENDS |= dict.fromkeys(_ERRORS, msgspec.msgpack.Decoder(str))
_MESSAGES = msgspec.msgpack.Decoder(tuple[_Message, ...])
_CALL_MESSAGES = msgspec.msgpack.Decoder(
    Annotated[tuple[_Message, ...], msgspec.Meta(max_length=BATCH_CALLS)]
)
_ANSWERS: dict[type, type] = {
    commands.Pull: PullReport,
    commands.ReadTokens: EngineReading,
    commands.ReadStats: EngineStats,
}
_ENCODER = msgspec.msgpack.Encoder()


def encode_calls(calls: Iterable[ToReplica]) -> Iterator[tuple[int, bytes]]:
    """Encode calls in batches of at most `BATCH_CALLS` and `BATCH_BYTES`, or of one call that is
    larger, each with the number of its calls; without calls, in one batch."""
    batch: list[msgspec.Raw] = []
    num_bytes = 0
    for call in calls:
        kind = type(call.payload).__name__
        if kind not in _CALLS:
            raise TypeError(f"a served replica executes no {call.payload!r}")
        encoded = _ENCODER.encode(_message(kind, call.call_id, call.payload, call.streams))
        is_full = num_bytes + len(encoded) > BATCH_BYTES or len(batch) == BATCH_CALLS
        if batch and is_full:
            yield len(batch), _ENCODER.encode(batch)
            batch, num_bytes = [], 0
        batch.append(msgspec.Raw(encoded))
        num_bytes += len(encoded)
    yield len(batch), _ENCODER.encode(batch)


def decode_calls(data: bytes) -> list[tuple[ToReplica, int]]:
    """Undo `encode_calls`; with each call comes the number of its bytes. ValueError: the bytes are
    not from there."""
    calls = []
    for one, payload in _decoded(data, _CALLS, _CALL_MESSAGES):
        call = Call(call_id=_id(one, payload), payload=payload, streams=one.streams)
        calls.append((call, len(one.payload)))
    return calls


def encode_ends(messages: tuple[FromReplica, ...]) -> bytes:
    encoded = []
    for one in messages:
        if isinstance(one, Progress):
            encoded.append(_message("Progress", one.request_id, one))
        elif one.error is None:
            encoded.append(_message(type(one.result).__name__, one.call_id, one.result))
        else:
            kinds = (name for name, kind in _ERRORS.items() if isinstance(one.error, kind))
            kind = next(kinds, "GenerationError")
            encoded.append(_message(kind, one.call_id, str(one.error)))
    return _ENCODER.encode(encoded)


def is_answer(result: object, payload: object) -> bool:
    """Whether a command may end with this result."""
    if isinstance(result, PullReport) and isinstance(payload, commands.Pull):
        return result.version == payload.version
    return type(result) is _ANSWERS.get(type(payload), NoneType)


def decode_ends(data: bytes) -> tuple[FromReplica, ...]:
    """Undo `encode_ends`. ValueError: the bytes are not from there."""
    messages: list[FromReplica] = []
    for one, payload in _decoded(data, _ENDS):
        if isinstance(payload, Progress):
            messages.append(payload)
        elif one.kind in _ERRORS:
            messages.append(End(call_id=_id(one, payload), error=_ERRORS[one.kind](payload)))
        else:
            messages.append(End(call_id=_id(one, payload), result=payload))
    return tuple(messages)


def _message(kind: str, call_id: CallId, payload: object, streams: bool = False) -> _Message:
    return _Message(kind, call_id, msgspec.Raw(_ENCODER.encode(payload)), streams)


def _id(message: _Message, payload: object) -> CallId:
    """Requests and completions have their ids; of the rest only an error may end a request."""
    if isinstance(payload, GenerationRequest | Completion):
        return payload.request_id
    if isinstance(message.call_id, str) and message.kind not in _ERRORS:
        raise ValueError(f"{message.kind} is neither a request nor the end of one")
    return message.call_id


def _decoded(
    data: bytes,
    decoders: Mapping[str, msgspec.msgpack.Decoder[Any]],
    messages: msgspec.msgpack.Decoder[tuple[_Message, ...]] = _MESSAGES,
) -> list[tuple[_Message, Any]]:
    try:
        return [(one, decoders[one.kind].decode(one.payload)) for one in messages.decode(data)]
    except (msgspec.MsgspecError, RecursionError, KeyError) as error:
        raise ValueError(f"these are no messages of a replica's channel: {error}") from error
