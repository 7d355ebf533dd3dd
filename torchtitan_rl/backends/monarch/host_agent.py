"""The agent of a run on one of its other hosts: an actor in a process of its own, started first and
ended last. It says what the host has, and ends processes there that do not end by themselves.
"""

from __future__ import annotations

import asyncio
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint

from torchtitan_rl.backends.monarch.processes import Processes
from torchtitan_rl.config.checks.machine import machine_facts
from torchtitan_rl.config.checks.resume import policy_fingerprint
from torchtitan_rl.config.hosts import HostFacts
from torchtitan_rl.config.installed import installed
from torchtitan_rl.config.policies import resolve_checkpoint
from torchtitan_rl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAnswer:
    """What a host has. Where the policy cannot be read, ``policy_error`` says why."""

    facts: HostFacts
    python: str  # the interpreter
    installed: dict[str, str] = field(default_factory=dict)
    policy_dir: Path = Path()
    policy: str = ""  # `policy_fingerprint`
    policy_error: str = ""


class HostAgent(Actor):
    """On each host but the controller's own machine."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._held: dict[tuple[int, ...], Processes] = {}

    @concurrent_endpoint
    async def answer(self, checkpoint: str) -> HostAnswer:
        return await asyncio.to_thread(describe_host, self._address, checkpoint)

    @concurrent_endpoint
    async def sees(self, file: Path, content: bytes) -> bool:
        """Whether a file that the controller has just written has the same content here."""
        try:
            return await asyncio.to_thread(file.read_bytes) == content
        except OSError:
            return False

    @concurrent_endpoint
    async def hold(self, pids: tuple[int, ...]) -> None:
        """Take hold of processes of this host while they run."""
        self._held[pids] = Processes(pids)

    @concurrent_endpoint
    async def end(self, pids: tuple[int, ...], timeout_s: float) -> list[int]:
        """See `Processes.end`."""
        held = self._held.pop(pids, None)
        return [] if held is None else await held.end(timeout_s)


def describe_host(address: str, checkpoint: str) -> HostAnswer:
    """This machine, and the policy as it is here."""
    machine = machine_facts()
    policy_dir, policy, error = Path(), "", ""
    try:
        policy_dir = resolve_checkpoint(checkpoint)
        policy = policy_fingerprint(policy_dir)
    except ConfigError as refusal:
        error = str(refusal)
    except (OSError, ValueError) as unreadable:
        error = f"policy.checkpoint is {checkpoint}: {unreadable}"
    return HostAnswer(
        facts=HostFacts(
            address=address,
            machine=platform.node(),
            cuda_devices=machine.cuda_devices,
            num_cores=machine.num_cores,
            memory_bytes=machine.memory_bytes,
        ),
        python=sys.executable,
        installed=installed(),
        policy_dir=policy_dir,
        policy=policy,
        policy_error=error,
    )
