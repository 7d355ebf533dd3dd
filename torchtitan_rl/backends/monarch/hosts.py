"""The hosts of a run: where processes are spawned, and how they are ended there in any case.

`attach` contacts the workers of ``launch.attach``, before the run is planned. Each host is attached
by itself, so that the loss of one leaves the others as they are, and has a `HostAgent` in a process
of its own. Without ``launch.attach`` everything is on this machine.

`launch.monarch_environment` must be set before this module is imported.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import (
    ActorError,
    HostMesh,
    attach_to_workers,
    default_bootstrap_cmd,
    enable_transport,
    this_host,
)

from torchtitan_rl.backends.monarch.host_agent import HostAgent, HostAnswer
from torchtitan_rl.backends.monarch.processes import Processes
from torchtitan_rl.config.hosts import CONTROLLER_HOST, HostFacts
from torchtitan_rl.config.installed import differences
from torchtitan_rl.config.launch import LaunchConfig
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.addresses import LOCAL, Address
from torchtitan_rl.weights.transport import host_name

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
_AGENT_TIMEOUT_S = 15.0  # on top of the time that the agent itself may take
_CA: Any = "trust_all_connections"  # as Monarch has it; see `launch.tls` for who is trusted


class Ending(Protocol):
    """Processes that can be ended in any case."""

    async def end(self, timeout_s: float) -> list[int]:
        """See `Processes.end`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """``agent`` is None on the controller's machine."""

    index: int
    name: str  # processes on hosts of one name can share memory
    ip: str  # address or name that other hosts reach its processes by
    mesh: HostMesh  # of this one host, without an axis
    agent: Any = None
    python: str = ""  # the interpreter there; empty: as here
    policy_dir: Path | None = None  # there; None: as here

    def command(self, environment: Mapping[str, str]) -> Any:
        """How a process is started there, as Monarch's ``BootstrapCommand``."""
        command = default_bootstrap_cmd().with_env(dict(environment))
        if self.python:
            command.program = self.python
        return command

    async def hold(self, pids: tuple[int, ...]) -> Ending:
        """Take hold of processes of this host while they run."""
        if self.agent is None:
            return Processes(pids)
        await asyncio.wait_for(self.agent.hold.call_one(pids), _AGENT_TIMEOUT_S)
        return _FarProcesses(agent=self.agent, host=self.name, pids=pids)


class Hosts:
    """The hosts of a run, by their index in its plan; each is this machine where none is named."""

    def __init__(
        self,
        hosts: Sequence[Host] = (),
        facts: Sequence[HostFacts] = (),
        *,
        attached: Sequence[HostMesh] = (),
        ip: str = "127.0.0.1",
    ) -> None:
        self.facts = tuple(facts)
        self._hosts = tuple(hosts)
        self._attached = tuple(attached)
        self._ip = ip

    def __getitem__(self, index: int) -> Host:
        if index == CONTROLLER_HOST or not self._hosts:
            return local_host(index, ip=self._ip)
        return self._hosts[index]

    def without_folder(self, indices: Iterable[int], folder: Path) -> list[str]:
        """Those of these hosts where ``folder`` is not the one of this machine."""
        far = {self[index].name: self[index].agent for index in indices if self[index].agent}
        with tempfile.NamedTemporaryFile(prefix=".torchtitan-rl-", dir=folder) as file:
            content = uuid.uuid4().bytes
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # an NFS client keeps what it writes
            asked = {
                name: agent.sees.call_one(Path(file.name), content) for name, agent in far.items()
            }
            answers = _wait_for_all(asked, time.monotonic() + _AGENT_TIMEOUT_S)
            return [name for name, sees in answers.items() if not sees]

    def detach(self) -> None:
        """End what runs on the other hosts; their workers stay, for the next run. Blocks for
        seconds where one is gone."""
        for stop in [mesh.stop() for mesh in self._attached]:
            try:
                stop.get(timeout=_STOP_TIMEOUT_S)
            except (TimeoutError, RuntimeError, SupervisionError) as error:
                logger.warning("a host was not left in order: %s", error or "no answer")


def local_host(index: int = CONTROLLER_HOST, *, ip: str = "127.0.0.1") -> Host:
    """The controller's machine."""
    return Host(index=index, name=host_name(), ip=ip, mesh=this_host())


def attach(
    launch: LaunchConfig, own: Address | None, *, checkpoint: str, here: HostAnswer
) -> Hosts:
    """Contact the workers, ask what they have, and compare it with what is ``here``. Call it before
    anything else of Monarch.

    Args:
        own: where this controller listens; None where all hosts are this machine.
        checkpoint: the policy, as `resolve_checkpoint` takes it; a directory has the same path on
            all hosts.

    Raises:
        ConfigError: a worker does not answer, or its host has other code or another policy; nothing
            is left on any of them.
    """
    deadline_s = time.monotonic() + launch.attach_timeout_s
    if own is not None:
        enable_transport(str(own))
    far = [text for text in launch.attach if text != LOCAL]
    meshes = {text: attach_to_workers(ca=_CA, workers=[text]) for text in far}
    hosts = Hosts(attached=tuple(meshes.values()))
    try:
        _wait_for_all({text: mesh.initialized for text, mesh in meshes.items()}, deadline_s)
        agents = {text: _spawn_agent(mesh, text) for text, mesh in meshes.items()}
        asked = {text: agent.answer.call_one(checkpoint) for text, agent in agents.items()}
        answers = _wait_for_all(asked, deadline_s)
        if errors := [e for text in far for e in answer_errors(text, here, answers[text])]:
            raise ConfigError(errors)
    except BaseException:
        hosts.detach()
        raise
    ip = "127.0.0.1" if own is None else own.host
    return Hosts(
        [
            local_host(index, ip=ip)
            if text == LOCAL
            else Host(
                index=index,
                name=text,
                ip=Address.parse(text).host,
                mesh=meshes[text].slice(hosts=0),
                agent=agents[text],
                python=answers[text].python,
                policy_dir=answers[text].policy_dir,
            )
            for index, text in enumerate(launch.attach)
        ],
        [here.facts if text == LOCAL else answers[text].facts for text in launch.attach],
        attached=tuple(meshes.values()),
        ip=ip,
    )


def answer_errors(address: str, here: HostAnswer, there: HostAnswer) -> list[str]:
    """How a host differs from the controller's machine where it must not."""
    field = f"launch.attach: {address} has"
    errors = [
        f"{field} {difference}; install the same on both"
        for difference in differences(here.installed, there.installed)
    ]
    if there.policy_error:
        return [*errors, f"launch.attach: on {address}, {there.policy_error}"]
    if there.policy != here.policy:
        errors.append(
            f"{field} another model in {there.policy_dir} ({there.policy[:12]}) than the "
            f"controller in {here.policy_dir} ({here.policy[:12]}); copy the policy there"
        )
    return errors


@dataclass(frozen=True, slots=True, kw_only=True)
class _FarProcesses:
    """Processes that an agent holds."""

    agent: Any
    host: str
    pids: tuple[int, ...]

    async def end(self, timeout_s: float) -> list[int]:
        answer = self.agent.end.call_one(self.pids, timeout_s)
        try:
            return list(await asyncio.wait_for(answer, 2 * timeout_s + _AGENT_TIMEOUT_S))
        except (TimeoutError, ActorError, SupervisionError) as error:
            cause = error or "no answer"
            logger.warning("%s: whether its processes have ended is unknown: %s", self.host, cause)
            return []


def _spawn_agent(mesh: HostMesh, address: str) -> Any:
    process = mesh.slice(hosts=0).spawn_procs(per_host={"ranks": 1}, name="agent")
    return process.spawn("agent", HostAgent, address).slice(ranks=0)


def _wait_for_all(answers: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
    """What each address answers.

    Raises:
        ConfigError: which of them do not, and why.
    """
    found, errors = {}, []
    for address, answer in answers.items():
        try:
            found[address] = answer.get(timeout=max(0.1, deadline_s - time.monotonic()))
        except TimeoutError:
            errors.append(
                f"launch.attach: {address} does not answer; is `torchtitan-rl worker --address "
                f"{address}` running there, is the port open, and can it reach this machine at "
                "launch.address?"
            )
        except (ActorError, SupervisionError, RuntimeError, ValueError, OSError) as error:
            errors.append(f"launch.attach: {address} failed: {' '.join(str(error).split())}")
    if errors:
        raise ConfigError(errors)
    return found
