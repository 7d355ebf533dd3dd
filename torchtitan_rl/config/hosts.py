"""What a run knows of its hosts before it starts processes on them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

CONTROLLER_HOST = -1  # as `ProcessGroup.host`: the controller's machine, wherever the others are

_MADE_UP = re.compile(r"(?P<hosts>[1-9]\d{0,3})x(?P<devices>\d{1,3})")
_MADE_UP_CORES = 64
_MADE_UP_MEMORY = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One host. ``cuda_devices`` are named as in its own ``CUDA_VISIBLE_DEVICES``."""

    address: str  # of its worker, or ``local``; empty where the host is made up
    machine: str = ""  # what it calls itself
    cuda_devices: tuple[str, ...] = ()
    num_cores: int
    memory_bytes: int

    def describe(self) -> str:
        """``tls://10.0.0.2:26600 (node7), 8 CUDA devices``, or its cores."""
        devices = len(self.cuda_devices)
        has = count(devices, "CUDA device") if devices else count(self.num_cores, "core")
        where = f"{self.address} ({self.machine})" if self.machine else self.address
        return ", ".join(part for part in (where, has) if part)


def made_up_hosts(text: str, addresses: Sequence[str] = ()) -> tuple[HostFacts, ...]:
    """The hosts of ``launch.hosts``: ``4x8`` is 4 hosts of 8 CUDA devices.

    Raises:
        ValueError: it says something else.
    """
    found = _MADE_UP.fullmatch(text)
    if found is None:
        raise ValueError("give NUMBERxDEVICES, such as 4x8, or 4x0 for hosts without CUDA devices")
    number, devices = int(found["hosts"]), int(found["devices"])
    return tuple(
        HostFacts(
            address=addresses[index] if index < len(addresses) else "",
            cuda_devices=tuple(map(str, range(devices))),
            num_cores=_MADE_UP_CORES,
            memory_bytes=_MADE_UP_MEMORY,
        )
        for index in range(number)
    )


def device_of(hosts: Iterable[HostFacts]) -> Literal["cpu", "cuda"]:
    """What a run computes on: CUDA where any host has it; hosts without it then stay unused."""
    return "cuda" if any(host.cuda_devices for host in hosts) else "cpu"


def host_name(index: int) -> str:
    """As a host is called in the plan, in logs and in errors."""
    return "controller" if index == CONTROLLER_HOST else f"host{index}"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
