"""Which machines a run uses, and how it reaches them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """The hosts of a run. Without ``attach`` it runs on this machine alone."""

    attach: tuple[str, ...] = ()
    """The hosts, in order: addresses of ``torchtitan-rl worker`` processes, one on each
    (``tls://10.0.0.2:26600``), or ``local`` for this machine."""
    hosts: str = ""
    """With ``--dry-run``: plan for hosts that are not there. ``4x8`` is 4 hosts of 8 CUDA devices,
    ``4x0`` 4 hosts that compute on their CPU."""
    generator_hosts: tuple[int, ...] = ()
    """The hosts of the replicas, by their places in ``attach``, counted from 0; replicas are spread
    over them. Empty: the first ones that the trainer leaves free. Colocated replicas fill the
    trainer's hosts first."""
    trainer_hosts: tuple[int, ...] = ()
    """The hosts of the trainer's ranks, likewise; CUDA devices of one are used before those of the
    next. Empty: as few as possible, from the last one; colocated, those of the replicas."""
    address: str = ""
    """Where workers reach this controller, ``tls://10.0.0.1:26600``; it listens there alone. Empty:
    a free port of 127.0.0.1, where all workers are on loopback addresses."""
    interface: str = ""
    """With torchrun: what this host listens on, the name of a network interface (``eth1``) or an
    address or name of the host. Empty: the interface that leads to the other hosts."""
    port: int = 0
    """With torchrun: the port of each host's worker, which may use the 15 that follow, too; the
    controller listens on the next. For firewalls; 0: free ports."""
    keys: Path | None = None
    """A folder that ``torchtitan-rl keys`` wrote; ``tls://`` needs it on every host."""
    allow_plain_tcp: bool = False
    """Also send plain text, neither encrypted nor authenticated: to ``tcp://`` addresses, loopback
    ones included, and between trainer ranks on several machines."""
    attach_timeout_s: float = 60.0
    """Deadline for all hosts to answer and say what they have, in seconds."""


def has_hosts(launch: LaunchConfig) -> bool:
    """Whether hosts are named, if only one; else the run is on this machine, which needs none."""
    return bool(launch.attach or launch.hosts)
