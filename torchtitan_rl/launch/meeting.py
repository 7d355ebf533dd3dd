"""How the launchers of a run meet: `Node` reads torchrun's variables, `Joining` forms a `Round`.

A launcher is the one process that torchrun starts on a node; see `Node`. The launchers meet in
torchrun's store. The store survives a restart, so it may have values of earlier launchers, and
torchrun's restart counts differ between nodes. Therefore each launcher draws a random nonce, and
rank 0's nonce is the token of the round:

| who | writes | until |
|---|---|---|
| every other rank | ``node/R = nonce`` | rank 0's ``round`` has this rank's nonce |
| rank 0 | ``round = token, {R: nonce}``, with all nonces found | all other ranks have answered with
this token |
| every other rank | ``joined/R = token`` | |

From then on all keys begin with the token, which launchers of other rounds do not know:
``host/R``, ``address/R``, ``refused/R``, ``failed/R``, ``beat``, ``stop``, ``end``, ``left/R``.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torchtitan_rl.errors import ConfigError

# Processes that a launcher starts must not inherit these variables. The ranks of these processes
# differ from the launcher's rank, and with TORCHELASTIC_USE_AGENT_STORE the processes would wait
# indefinitely for a store that is not theirs. torchrun sets OMP_NUM_THREADS to 1.
_TORCHRUN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")

RESUME_COMMAND = "TORCHTITAN_RL_RESUME_COMMAND"
"""An environment variable of the controller: the command that resumes the run. It is set if the
controller's own command would not resume the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One launcher among ``num_nodes``. Rank 0 runs the controller."""

    rank: int = 0
    num_nodes: int = 1
    store_host: str = ""
    store_port: int = 0
    provides_store: bool = False
    """Whether the launcher of rank 0 must provide the store, because torchrun's agents do not."""
    restarts: int = 0
    """How often torchrun has started this launcher again."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Node:
        """Read torchrun's environment variables. Raises ConfigError if they are incomplete, or
        there are several launchers on a node."""
        num_nodes = _number(environment, "WORLD_SIZE", 1)
        if num_nodes == 1:
            return cls(restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0))
        local = _number(environment, "LOCAL_WORLD_SIZE", 1)
        if num_nodes < 1 or local != 1:
            raise ConfigError(
                f"LOCAL_WORLD_SIZE is {local} and WORLD_SIZE {num_nodes}: start one launcher on "
                "each node with --nproc-per-node=1; it starts all other processes"
            )
        missing = [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not environment.get(n)]
        if missing:
            raise ConfigError(
                f"{', '.join(missing)} not set, but WORLD_SIZE is {num_nodes}: start this module "
                "by torchrun, or set the variables as torchrun does"
            )
        rank = _number(environment, "RANK", 0)
        if not 0 <= rank < num_nodes:
            raise ConfigError(f"RANK is {rank}: it must be from 0 to {num_nodes - 1}")
        port = _number(environment, "MASTER_PORT", 0)
        if not 0 < port < 1 << 16:
            raise ConfigError(f"MASTER_PORT is {port}: give 1 to 65535")
        has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank=rank,
            num_nodes=num_nodes,
            store_host=environment["MASTER_ADDR"],
            store_port=port,
            provides_store=rank == 0 and not has_agent,
            restarts=_number(environment, "TORCHELASTIC_RESTART_COUNT", 0),
        )


def without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for processes that a launcher starts."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _TORCHRUN_VARIABLES and not name.startswith(_TORCHRUN_PREFIXES)
    }


def resume_options(words: Sequence[str], *, is_again: bool) -> list[str]:
    """The options to add to those of a run; ``is_again``: torchrun starts the run again."""
    return ["--checkpoint.resume"] if is_again and "--checkpoint.resume" not in words else []


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, str(default))
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name} is {value!r}: it must be a whole number") from None


_PREFIX = "torchtitan_rl"


class Store(Protocol):
    """The methods of torch's ``TCPStore`` that are used here."""

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
        """The ranks for which this launcher still waits."""
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
    """Messages between the launchers, after they have met and until the run ends."""

    store: Store
    token: str
    num_nodes: int
    _beats: int = 0

    def say(self, name: str, value: object) -> None:
        _write(self.store, f"{self.token}/{name}", str(value))

    def hear(self, name: str) -> str | None:
        return _read(self.store, f"{self.token}/{name}")

    def hear_of_nodes(self, name: str) -> list[str | None]:
        """The values that the nodes have written under ``name``, by rank; None if not written."""
        return [self.hear(f"{name}/{rank}") for rank in range(self.num_nodes)]

    def beat(self) -> None:
        """Tell the other launchers that rank 0 is alive."""
        self._beats += 1
        self.say("beat", self._beats)

    def is_repeated(self) -> bool:
        """Whether an earlier round has already called this. Rank 0 calls it once in each round,
        because torchrun does not count restarts after a node has come back."""
        before = _read(self.store, "started")
        _write(self.store, "started", self.token)
        return before is not None


def _write(store: Store, key: str, value: str) -> None:
    store.set(f"{_PREFIX}/{key}", value)


def _read(store: Store, key: str) -> str | None:
    key = f"{_PREFIX}/{key}"
    return store.get(key).decode() if store.check([key]) else None
