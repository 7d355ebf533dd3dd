"""The agent of a run on another host: an actor in a separate process, which is started first and
ended last."""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from monarch.actor import Actor, concurrent_endpoint

from torchtitan_rl.config.loader import installed
from torchtitan_rl.config.machine import HostFacts, machine_facts
from torchtitan_rl.config.model import resolve_checkpoint
from torchtitan_rl.config.resume import policy_digest
from torchtitan_rl.config.run import cannot_write
from torchtitan_rl.errors import ConfigError, ProcessLostError
from torchtitan_rl.files import FilePiece, file_sizes, read_new
from torchtitan_rl.launch.interfaces import own_address
from torchtitan_rl.launch.workers import claim_incarnation, is_leaving, record_beat, record_run_end
from torchtitan_rl.processes import Processes, hold_marked

_START_S = 60.0  # for the processes of a mesh to be there
_LAST_ANSWER_S = 1.0  # for the answer to be sent


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAnswer:
    """The description of a host. If the policy cannot be read, ``policy_error`` says why."""

    facts: HostFacts
    installed: dict[str, str] = field(default_factory=dict)
    policy_dir: Path = Path()
    policy: str = ""  # `policy_digest`
    policy_error: str = ""
    is_busy: bool = False  # its worker serves another run
    ip: str = ""  # an address or name of its own, for hosts of a job


class HostAgent(Actor):
    def __init__(self, address: str) -> None:
        self._address = address
        self._held: dict[str, Processes] = {}  # by mark
        self._has_claim = claim_incarnation()
        if self._has_claim:
            record_beat()

    @concurrent_endpoint
    async def beat(self) -> tuple[int, bool]:
        """Note a heartbeat of the controller. Returns this host's time, in nanoseconds of the Unix
        clock, and whether the worker waits for the run to leave the host."""
        there_ns = time.time_ns()
        if self._has_claim:
            record_beat()
        return there_ns, is_leaving()

    @concurrent_endpoint
    async def end_run(self) -> bool:
        """End the run on this host: the worker ends all processes that remain of the run. If the
        worker serves another run, or is not ours, only this process ends, and the result is
        False."""
        is_ending = self._has_claim and record_run_end()
        if not is_ending:
            asyncio.get_running_loop().call_later(_LAST_ANSWER_S, os._exit, 0)
        return is_ending

    @concurrent_endpoint
    async def files_there(
        self, folder: Path, patterns: Sequence[str], sign: str
    ) -> dict[str, int] | None:
        """Return the sizes of the files in ``folder``; None if it is the controller's own folder,
        in which the controller has created the file ``sign``."""
        if (folder / sign).exists():
            return None
        return file_sizes(folder, patterns)

    @concurrent_endpoint
    async def read_new(
        self, folder: Path, patterns: Sequence[str], offsets: dict[str, int], sign: str
    ) -> list[FilePiece]:
        """See `files.read_new`. Returns nothing from the controller's own folder, because the
        copies would overwrite the originals."""
        if (folder / sign).exists():
            return []
        return await asyncio.to_thread(read_new, folder, offsets, patterns=patterns)

    @concurrent_endpoint
    async def answer(self, checkpoint: str) -> HostAnswer:
        answer = await asyncio.to_thread(describe_host, self._address, checkpoint)
        return replace(answer, is_busy=not self._has_claim)

    @concurrent_endpoint
    async def sees(self, file: Path, content: bytes) -> bool:
        try:
            return await asyncio.to_thread(file.read_bytes) == content
        except OSError:
            return False

    @concurrent_endpoint
    async def cannot_write(self, folder: Path) -> str:
        return await asyncio.to_thread(cannot_write, folder)

    @concurrent_endpoint
    async def hold(self, mark: str, number: int) -> None:
        """See `hold_marked`. The worker, which started this process, starts the others too."""
        async with asyncio.timeout(_START_S):
            self._held[mark] = await hold_marked(os.getppid(), mark, number)

    @concurrent_endpoint
    async def loss(self, mark: str, name: str) -> ProcessLostError:
        """Wait for the loss of one of these processes; see `Processes.wait_until_lost`."""
        try:
            await self._held[mark].wait_until_lost(name)
        except ProcessLostError as error:
            return error

    @concurrent_endpoint
    async def end(self, mark: str, timeout_s: float) -> list[int]:
        held = self._held.pop(mark, None)
        return [] if held is None else await held.end(timeout_s)


def describe_host(address: str, checkpoint: str) -> HostAnswer:
    policy_dir, policy, error = Path(), "", ""
    try:
        policy_dir = resolve_checkpoint(checkpoint)
        policy = policy_digest(policy_dir)
    except ConfigError as refusal:
        error = str(refusal)
    except (OSError, ValueError) as unreadable:
        error = f"policy.checkpoint is {checkpoint}: {unreadable}"
    return HostAnswer(
        facts=replace(machine_facts(), address=address, machine=platform.node()),
        installed=installed(),
        policy_dir=policy_dir,
        policy=policy,
        policy_error=error,
        ip=own_address(),
    )
