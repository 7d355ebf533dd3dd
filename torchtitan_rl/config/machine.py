"""What a run knows of the machines it may use, before it starts processes on them.

CUDA counts the devices of ``CUDA_VISIBLE_DEVICES`` from 0 in each process. A child whose mask is to
be one of its parent's devices therefore needs that device's own name: the parent's mask, entry by
entry, or the plain index where the parent has no mask.
"""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

CONTROLLER_HOST = -1  # as `ProcessGroup.host`: the controller's machine, wherever the others are
VARIABLE = "CUDA_VISIBLE_DEVICES"
MIG = "MIG-"

_MADE_UP = re.compile(r"(?P<hosts>[1-9]\d{0,3})x(?P<devices>\d{1,3})")
_MADE_UP_CORES = 64
_MADE_UP_MEMORY = 1 << 40
_INDEX = re.compile(
    r"[ \t\n\v\f\r]*\+?(?P<digits>\d+)"
)  # as C reads a number: other characters may follow
_CGROUP_CPU = (  # quota and period, of both versions
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What the machine has. ``cuda_devices`` are named as in ``CUDA_VISIBLE_DEVICES``."""

    cuda_devices: tuple[str, ...] = ()
    num_cores: int
    memory_bytes: int
    max_open_files: int | None = None  # of one process; None: any number


def machine_facts() -> MachineFacts:
    """Of the machine that this process runs on, as far as it may use it."""
    import psutil
    import torch

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineFacts(
        cuda_devices=visible_devices(
            os.environ.get(VARIABLE), num_visible=torch.cuda.device_count()
        ),
        num_cores=min([len(os.sched_getaffinity(0)), *_cgroup_cores()]),
        memory_bytes=min(psutil.virtual_memory().total, *_cgroup_limits()),
        max_open_files=None if soft == resource.RLIM_INFINITY else soft,
    )


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


def visible_devices(mask: str | None, *, num_visible: int) -> tuple[str, ...]:
    """The names of the devices that a process with this mask sees, in its order.

    Args:
        mask: the value of ``CUDA_VISIBLE_DEVICES``; None where it is not set.
        num_visible: how many devices CUDA reports to that process, which settles what the mask
            alone does not say: whether an index or UUID exists. (It reports no more than one MIG
            instance to a process; each child may be given another.)

    >>> visible_devices(None, num_visible=2)
    ('0', '1')
    >>> visible_devices("4,5", num_visible=2)
    ('4', '5')
    >>> visible_devices("4,-1,5", num_visible=1)
    ('4',)
    """
    if mask is None:
        return tuple(str(index) for index in range(num_visible))
    names = named_devices(mask)
    if num_visible and names and names[0].startswith(MIG):
        return names
    return names[:num_visible]


def named_devices(mask: str) -> tuple[str, ...]:
    """The entries of a mask up to the first one that names no device, as CUDA reads them.

    An index may be followed by other characters, which CUDA ignores. The first entry says whether
    all are indices, ``GPU-`` UUIDs (or beginnings of them) or ``MIG-`` names; another kind ends the
    list. A device that is named twice makes the whole mask invalid: none is visible.
    """
    kind: str | None = None
    names: list[str] = []
    for entry in mask.split(","):
        found, name = _read_entry(entry)
        if found is None or (kind is not None and found != kind):
            break
        kind = found
        if name in names:
            return ()
        names.append(name)
    return tuple(names)


def _read_entry(entry: str) -> tuple[str | None, str]:
    """The kind of an entry (None: it names no device), and the name to pass on."""
    text = entry.strip()
    for prefix in ("GPU-", MIG):
        if text.startswith(prefix):
            return prefix, text
    index = _INDEX.match(entry)
    return ("index", str(int(index["digits"]))) if index else (None, "")


def _cgroup_cores() -> list[int]:
    """As many as this process's container may keep busy, where it has such a limit."""
    cores: list[int] = []
    for paths in _CGROUP_CPU:
        try:
            quota, period = " ".join(Path(path).read_text() for path in paths).split()
            cores += [math.ceil(int(quota) / int(period))] if int(quota) > 0 else []
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return cores


def _cgroup_limits() -> list[int]:
    """The memory limit of this process's container, where it has one."""
    limits = []
    for path in _CGROUP_LIMITS:
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # another version of cgroups, or "max"
            continue
    return limits
