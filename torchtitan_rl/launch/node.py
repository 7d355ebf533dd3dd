"""What torchrun's environment variables say about a launcher: its rank, and where the others meet.

A launcher is the one process that torchrun starts on a node. The same variables can be set by hand
(``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``); rank 0 then provides the store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchtitan_rl.errors import ConfigError

# The launcher's rank is not that of the processes it starts; with TORCHELASTIC_USE_AGENT_STORE they
# would wait indefinitely for a store that is not theirs. torchrun sets OMP_NUM_THREADS to 1.
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
"""In a controller's environment: what continues the run, where its own command would not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One launcher among ``num_nodes``. Rank 0 runs the controller."""

    rank: int = 0
    num_nodes: int = 1
    store_host: str = ""
    store_port: int = 0
    provides_store: bool = False
    """No torchrun agent has the store: the launcher of rank 0 does."""
    restarts: int = 0
    """How often torchrun has started this launcher again."""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Node:
        """
        Raises:
            ConfigError: the variables are incomplete, or there are several launchers on a node.
        """
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
    """The environment of what a launcher starts."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _TORCHRUN_VARIABLES and not name.startswith(_TORCHRUN_PREFIXES)
    }


def resume_options(words: Sequence[str], *, is_again: bool) -> list[str]:
    """What is added to the options of a run that torchrun starts ``is_again``."""
    return ["--checkpoint.resume"] if is_again and "--checkpoint.resume" not in words else []


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, str(default))
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name} is {value!r}: it must be a whole number") from None
