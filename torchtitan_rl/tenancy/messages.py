"""The messages between a run and the `torchtitan-rl serve` whose engines it uses, as bytes
(msgpack): those of a replica's channel (`generation.server`). Decoding checks all types and runs no
code, because the other side may be another user's program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import msgspec

from torchtitan_rl.channel import Call, End
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
LEASE_S = 60.0  # after this time without a request of the run, its place is free
BATCH_BYTES = 16 << 20  # of calls, in one request
WAIT_S = 5.0  # how long the server keeps a request for messages that are not there yet


class _Request(msgspec.Struct, tag="request", frozen=True):
    request: GenerationRequest
    streams: bool


class _Abort(msgspec.Struct, tag="abort", frozen=True):
    call_id: int
    request_ids: tuple[str, ...]


class _Pull(msgspec.Struct, tag="pull", frozen=True):
    call_id: int
    version: int


class _Pause(msgspec.Struct, tag="pause", frozen=True):
    call_id: int
    mode: commands.PauseMode


_Plain = Literal["resume", "read_tokens", "read_stats"]
_PLAIN: dict[_Plain, Any] = {
    "resume": commands.Resume,
    "read_tokens": commands.ReadTokens,
    "read_stats": commands.ReadStats,
}


class _PlainCommand(msgspec.Struct, tag="command", frozen=True):
    call_id: int
    name: _Plain


_Sent = _Request | _Abort | _Pull | _Pause | _PlainCommand

_ErrorName = Literal[
    "GenerationTimeoutError", "InvalidRequestError", "ReplicaError", "GenerationError"
]
_KINDS = (GenerationTimeoutError, InvalidRequestError, ReplicaError, GenerationError)
_ERRORS: dict[str, type[GenerationError]] = {kind.__name__: kind for kind in _KINDS}


class _Reported(msgspec.Struct, tag="progress", frozen=True):
    progress: Progress


class _Ended(msgspec.Struct, tag="ended", frozen=True):
    completion: Completion


class _Answered(msgspec.Struct, tag="answered", frozen=True):
    """The answer of a command: of the field that is not None."""

    call_id: int
    report: PullReport | None = None
    reading: EngineReading | None = None
    stats: EngineStats | None = None


class _Failed(msgspec.Struct, tag="failed", frozen=True):
    call_id: str | int
    error: _ErrorName
    message: str


_Received = _Reported | _Ended | _Answered | _Failed

_T = TypeVar("_T")
_ENCODER = msgspec.msgpack.Encoder()
_SENT = msgspec.msgpack.Decoder(tuple[_Sent, ...])
_RECEIVED = msgspec.msgpack.Decoder(tuple[_Received, ...])


def encode_calls(calls: tuple[ToReplica, ...]) -> Iterator[bytes]:
    """Encode calls in batches of at most `BATCH_BYTES`, or of one call that is larger; without
    calls, in one batch."""
    batch: list[msgspec.Raw] = []
    num_bytes = 0
    for call in calls:
        encoded = _ENCODER.encode(_sent(call))
        if batch and num_bytes + len(encoded) > BATCH_BYTES:
            yield _ENCODER.encode(batch)
            batch, num_bytes = [], 0
        batch.append(msgspec.Raw(encoded))
        num_bytes += len(encoded)
    yield _ENCODER.encode(batch)


def decode_calls(data: bytes) -> tuple[ToReplica, ...]:
    """Undo `encode_calls`. ValueError: the bytes are not from there."""
    sent = _decode(_SENT, data)
    return tuple(map(_call_of, sent))


def encode_ends(messages: tuple[FromReplica, ...]) -> bytes:
    return _ENCODER.encode([_received(message) for message in messages])


def decode_ends(data: bytes) -> tuple[FromReplica, ...]:
    """Undo `encode_ends`. ValueError: the bytes are not from there."""
    received = _decode(_RECEIVED, data)
    return tuple(map(_message_of, received))


def _decode(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"these are no messages of a replica's channel: {error}") from error


def _sent(call: ToReplica) -> _Sent:
    number: Any = call.call_id
    match call.payload:
        case GenerationRequest() as request:
            return _Request(request, call.streams)
        case commands.AbortRequests(request_ids):
            return _Abort(number, request_ids)
        case commands.Pull(version):
            return _Pull(number, version)
        case commands.Pause(mode):
            return _Pause(number, mode)
        case command:
            kind = next((name for name, kind in _PLAIN.items() if isinstance(command, kind)), None)
            if kind is None:
                raise TypeError(f"a served replica executes no {command!r}")
            return _PlainCommand(number, kind)


def _call_of(sent: _Sent) -> ToReplica:
    match sent:
        case _Request(request, streams):
            return Call(call_id=request.request_id, payload=request, streams=streams)
        case _Abort(call_id, request_ids):
            return Call(call_id=call_id, payload=commands.AbortRequests(request_ids))
        case _Pull(call_id, version):
            return Call(call_id=call_id, payload=commands.Pull(version))
        case _Pause(call_id, mode):
            return Call(call_id=call_id, payload=commands.Pause(mode))
        case _PlainCommand(call_id, name):
            return Call(call_id=call_id, payload=_PLAIN[name]())


def _received(message: FromReplica) -> _Received:
    match message:
        case Progress():
            return _Reported(message)
        case End(result=Completion() as completion):
            return _Ended(completion)
        case End(call_id=call_id, error=BaseException() as error):
            names: Any = (kind.__name__ for kind in _KINDS if isinstance(error, kind))
            return _Failed(call_id, next(names, "GenerationError"), str(error))
        case End(call_id=int(number), result=result):
            match result:
                case PullReport():
                    return _Answered(number, report=result)
                case EngineReading():
                    return _Answered(number, reading=result)
                case EngineStats():
                    return _Answered(number, stats=result)
            return _Answered(number)
    raise TypeError(f"not a message of a replica: {message!r}")


def _message_of(received: _Received) -> FromReplica:
    match received:
        case _Reported(progress):
            return progress
        case _Ended(completion):
            return End(call_id=completion.request_id, result=completion)
        case _Answered(call_id, report, reading, stats):
            return End(call_id=call_id, result=report or reading or stats)
        case _Failed(call_id, error, message):
            return End(call_id=call_id, error=_ERRORS[error](message))
