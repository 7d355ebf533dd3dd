"""Keeps the answers of `/v1/responses`, so that a later request can continue one by its id.

Each response is kept as JSON, with its own input and the id of the one before it; a conversation is
the chain of them. A response belongs to the session that asked for it, and no other one sees it.

Invariant: at most ``max_responses`` with ``max_bytes`` of JSON are kept. Those whose last use is
longest ago are dropped first; a conversation that is continued counts as used from end to start.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl.serving.messages import refused

Owner = str | None  # a session
_Key = tuple[Owner, str]

_OVERHEAD = 1024  # bytes of one entry, in addition to its JSON
_MAX_DROPPED = 100_000  # remembered, for a clear error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    response: bytes
    items: bytes
    previous: str | None

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items) + _OVERHEAD


class ResponseStore:
    def __init__(self, *, max_responses: int = 10_000, max_bytes: int = 64 << 20) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._stored: OrderedDict[_Key, _Stored] = OrderedDict()  # longest unused first
        self._dropped: OrderedDict[_Key, None] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def keep(
        self, owner: Owner, response: Mapping[str, Any], items: Sequence[Any], previous: str | None
    ) -> None:
        """Keep a response, with the input items that came with its request."""
        stored = _Stored(
            response=json.dumps(response).encode(),
            items=json.dumps(items).encode(),
            previous=previous,
        )
        self._stored[owner, response["id"]] = stored
        self.num_bytes += stored.num_bytes
        while self.num_bytes > self._max_bytes or len(self._stored) > self._max_responses:
            key, dropped = self._stored.popitem(last=False)
            self.num_bytes -= dropped.num_bytes
            self._dropped[key] = None
            if len(self._dropped) > _MAX_DROPPED:
                self._dropped.popitem(last=False)

    def conversation(self, owner: Owner, response_id: str) -> list[Any]:
        """The items of all inputs and outputs up to a response, oldest first.

        Raises:
            RefusedError: 404 or 410, it or one before it is not kept.
        """
        turns: list[_Stored] = []
        following: str | None = response_id
        while following is not None:
            turns.append(self._find(owner, following))
            following = turns[-1].previous
        return [
            item
            for turn in reversed(turns)
            for item in (*json.loads(turn.items), *json.loads(turn.response)["output"])
        ]

    def read(self, owner: Owner, response_id: str) -> bytes:
        """A response as JSON.

        Raises:
            RefusedError: 404 or 410, it is not kept.
        """
        return self._find(owner, response_id).response

    def delete(self, owner: Owner, response_id: str) -> None:
        """Raises:
        RefusedError: 404 or 410, it is not kept.
        """
        self.num_bytes -= self._find(owner, response_id).num_bytes
        del self._stored[owner, response_id]

    def _find(self, owner: Owner, response_id: str) -> _Stored:
        key = (owner, response_id)
        if key in self._stored:
            self._stored.move_to_end(key)
            return self._stored[key]
        if key in self._dropped:
            message = (
                f"response {response_id!r} is no longer kept, because many came after it: "
                "send the whole conversation as input"
            )
            raise refused(410, "response_dropped", message)
        message = f"there is no response {response_id!r} in this session"
        raise refused(404, "response_not_found", message)
