"""The address that a node listens on: of the interface that is named, else of the one that leads to
the other nodes.

The launchers of a run meet in torchrun's store, on which they agree anew after every restart.

The store outlives a restart, so it still has what the launchers of before wrote, and torchrun's
restart counts differ between nodes. Therefore each launcher draws a nonce, and rank 0 a token for
the round:

| who | writes | until |
|---|---|---|
| every other rank | ``node/R = nonce`` | rank 0's ``round`` has its nonce |
| rank 0 | ``round = token, {R: nonce}`` of the nonces it sees | all have answered with its token |
| every other rank | ``joined/R = token`` | |

From then on all keys begin with the token, which no launcher of another round knows:
``host/R``, ``address/R``, ``refused/R``, ``failed/R``, ``beat``, ``stop``, ``end``, ``left/R``.
"""

from __future__ import annotations

import json
import secrets
import socket
from dataclasses import dataclass, field
from typing import Protocol

import psutil

from torchtitan_rl.errors import ConfigError


def listening_host(interface: str, towards: str) -> str:
    """An address of this node, or the host name that ``interface`` is.

    Args:
        interface: an interface (``eth1``), an address or a host name of this node, or "".
        towards: a host that the address must lead to, where ``interface`` is "".

    Raises:
        ConfigError: there is no such interface, or no way to ``towards``.
    """
    if not interface:
        return _source_address(towards)
    found = psutil.net_if_addrs()
    if interface in found:
        for family in (socket.AF_INET, socket.AF_INET6):
            for one in found[interface]:
                if one.family == family and "%" not in one.address:  # link-local ones have a scope
                    return str(one.address)
        raise ConfigError(f"launch.interface is {interface!r}: that interface has no address")
    try:
        for family, kind, _, _, address in socket.getaddrinfo(
            interface, 0, type=socket.SOCK_STREAM
        ):
            with socket.socket(family, kind) as probe:
                probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"launch.interface is {interface!r}: this node has no such interface or address "
            f"({error.strerror}); its interfaces are {', '.join(found)}"
        ) from error
    return interface


def _source_address(towards: str) -> str:
    """Where packets to ``towards`` leave this node; none is sent."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"no way to {towards} ({error.strerror}): give an address of this node by "
            "--launch.interface"
        ) from error


_PREFIX = "torchtitan_rl"


class Store(Protocol):
    """What is used of torch's ``TCPStore``."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


@dataclass(slots=True)
class Joining:
    """One launcher that wants to meet the others; call `look` until it returns the round."""

    store: Store
    rank: int
    num_nodes: int
    _nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    _proposed: dict[str, str] | None = None

    def look(self) -> Round | None:
        return self._lead() if self.rank == 0 else self._follow()

    def missing(self) -> list[int]:
        """The ranks that it still waits for."""
        if self.rank:
            return [0]
        return [
            rank for rank in self._others() if _read(self.store, f"joined/{rank}") != self._nonce
        ]

    def _lead(self) -> Round | None:
        seen = {str(rank): _read(self.store, f"node/{rank}") for rank in self._others()}
        nonces = {rank: nonce for rank, nonce in seen.items() if nonce}
        if nonces != self._proposed:
            self._proposed = nonces
            _write(self.store, "round", json.dumps({"token": self._nonce, "nodes": nonces}))
        return None if self.missing() else Round(self.store, self._nonce, self.num_nodes)

    def _follow(self) -> Round | None:
        _write(self.store, f"node/{self.rank}", self._nonce)
        text = _read(self.store, "round")
        if text is None:
            return None
        proposed = json.loads(text)
        if proposed["nodes"].get(str(self.rank)) != self._nonce:
            return None
        token = str(proposed["token"])
        _write(self.store, f"joined/{self.rank}", token)
        return Round(self.store, token, self.num_nodes)

    def _others(self) -> range:
        return range(1, self.num_nodes)


@dataclass(slots=True)
class Round:
    """What the launchers tell each other, from the moment that they have met to the run's end."""

    store: Store
    token: str
    num_nodes: int
    _beats: int = 0

    def say(self, name: str, value: object) -> None:
        _write(self.store, f"{self.token}/{name}", str(value))

    def hear(self, name: str) -> str | None:
        return _read(self.store, f"{self.token}/{name}")

    def hear_of_nodes(self, name: str) -> list[str | None]:
        """By rank; None where a node has not said it."""
        return [self.hear(f"{name}/{rank}") for rank in range(self.num_nodes)]

    def beat(self) -> None:
        """Rank 0 says that it is alive."""
        self._beats += 1
        self.say("beat", self._beats)

    def is_repeated(self) -> bool:
        """For rank 0, once a round: whether an earlier round came as far. torchrun does not count
        the restarts that follow when a node comes back."""
        before = _read(self.store, "started")
        _write(self.store, "started", self.token)
        return before is not None


def _write(store: Store, key: str, value: str) -> None:
    store.set(f"{_PREFIX}/{key}", value)


def _read(store: Store, key: str) -> str | None:
    key = f"{_PREFIX}/{key}"
    return store.get(key).decode() if store.check([key]) else None
