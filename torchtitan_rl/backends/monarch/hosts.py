"""The hosts of a run: attaches them, and starts and ends processes there.

`attach` contacts the workers of ``launch.attach`` before the run is planned, `attach_job` those of
a Monarch job. Each host is used separately, so that the loss of one host does not affect the
others, and has a `HostAgent`. Otherwise all processes are on this machine.

`launch.monarch_environment` must be set before this module is imported.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from threading import Event
from typing import Any, NoReturn

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import (
    ActorError,
    HostMesh,
    attach_to_workers,
    default_bootstrap_cmd,
    enable_transport,
    this_host,
)

from torchtitan_rl.backends.monarch import PYTHON_VARIABLE
from torchtitan_rl.backends.monarch.host_agent import HostAgent, HostAnswer
from torchtitan_rl.config.loader import differences
from torchtitan_rl.config.machine import CONTROLLER_HOST, HostFacts
from torchtitan_rl.config.resume import digest_limit_s
from torchtitan_rl.config.run import LaunchConfig
from torchtitan_rl.errors import ConfigError, HostsBusyError, TorchtitanRLError
from torchtitan_rl.launch.addresses import LOCAL, Address
from torchtitan_rl.launch.interfaces import accepts, close_connections
from torchtitan_rl.launch.workers import CONTROLLER_LOST_S
from torchtitan_rl.processes import Processes, hold_marked

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.1
_MAX_CAUSE = 300  # characters
_AGENT_TIMEOUT_S = 15.0  # in addition to the time that the agent itself may take
_OLD_INCARNATION_S = CONTROLLER_LOST_S + 10.0  # time in which a worker ends what a lost run left
_BUSY_PAUSE_S = 6.0  # between attempts in this time
_SETTLE_S = 3.0  # wait after a worker begins to listen; Monarch may lose earlier messages
_RESET_S = 2.0  # time in which Monarch opens a channel again, and a new worker rejects it
_NUM_TRIES, _TRY_S = 3, 10.0  # to contact a worker again; Monarch needs 0.3 s on a quiet machine
_AGAIN_TIMEOUT_S = _NUM_TRIES * (_RESET_S + _TRY_S) + 20.0
_PAUSE_S, _MAX_PAUSE_S = 10.0, 320.0  # after a failed attempt
_ATTACH_ERRORS = (OSError, ActorError, SupervisionError, RuntimeError, ValueError)
# A worker that is not ours has no such variable: its own Python is used then, the first word of its
# command. -P: without the working folder in sys.path, where other users may have put modules.
_START = (
    f'exec "${{{PYTHON_VARIABLE}:-$(tr "\\000" "\\n" </proc/$PPID/cmdline | head -n 1)}}" '
    "-P -m torchtitan_rl.backends.monarch.bootstrap_main"
)
_ATTACH = "launch.attach"
_CA: Any = "trust_all_connections"  # Monarch's name; `launch.keys` decides who is trusted


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host of a run. ``agent`` is None on the controller's machine."""

    index: int
    name: str  # processes on hosts with the same name can share memory
    ip: str  # address or name under which other hosts reach its processes
    mesh: HostMesh  # only this host, without an axis
    agent: Any = None
    policy_dir: Path | None = None  # the policy's path on the host; None: as on this machine
    lost: Event = field(default_factory=Event)  # set once, when the host is given up

    async def hold(self, mark: str, number: int) -> HeldProcesses:
        """Wait for the processes with this mark, and return them; see `hold_marked`."""
        if self.agent is None:
            return await hold_marked(os.getpid(), mark, number)
        await self.agent.hold.call_one(mark, number)
        return FarProcesses(host=self, mark=mark)


def start_command(environment: Mapping[str, str]) -> Any:
    """Return the command that starts a process on any host, as Monarch's ``BootstrapCommand``."""
    command = default_bootstrap_cmd().with_env(dict(environment))
    command.program, command.args = "/bin/sh", ["-c", _START]
    return command


class NotAttachedError(TorchtitanRLError):
    """A lost host listens again, but could not be attached. There will be another attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """Requirements of every host: the policy, and the same software as ``here``."""

    checkpoint: str
    here: HostAnswer


@dataclass(slots=True)
class _Lost:
    away_s: float  # the last time at which it was lost or unreachable, or an attempt failed
    due_s: float  # time of the next attempt
    num_failures: int = 0  # consecutive ones

    def pause(self) -> float:
        """Record a failed attempt. Returns the seconds until the next one."""
        pause_s = min(_PAUSE_S * 2.0 ** min(self.num_failures, 8), _MAX_PAUSE_S)
        self.num_failures += 1
        self.due_s = time.monotonic() + pause_s
        return pause_s


class Hosts:
    """The hosts of a run, by their index in the run's plan; without ``hosts``, every index is this
    machine. A lost host that comes back is a new `Host` with the same index."""

    def __init__(
        self,
        hosts: Sequence[Host] = (),
        facts: Sequence[HostFacts] = (),
        *,
        wanted: _Wanted | None = None,
        ip: str = "127.0.0.1",
        field: str = _ATTACH,
    ) -> None:
        self.facts = tuple(facts)
        self._hosts = list(hosts)
        self._wanted = wanted
        self._ip = ip
        self._field = field  # the option that names the hosts
        self.can_return = field == _ATTACH  # whether a lost host can be attached again
        self._lost: dict[int, _Lost] = {}

    def __getitem__(self, index: int) -> Host:
        if index == CONTROLLER_HOST or not self._hosts:
            return local_host(index, ip=self._ip)
        return self._hosts[index]

    def without_folder(self, indices: Iterable[int], folder: Path) -> list[str]:
        """Return the names of those hosts on which ``folder`` is not this machine's."""
        far = {self[index].name: self[index].agent for index in indices if self[index].agent}
        with tempfile.NamedTemporaryFile(prefix=".torchtitan-rl-", dir=folder) as file:
            content = uuid.uuid4().bytes
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # an NFS client may buffer writes
            asked = {
                name: agent.sees.call_one(Path(file.name), content) for name, agent in far.items()
            }
            answers = _wait_for_all(asked, time.monotonic() + _AGENT_TIMEOUT_S, self._field)
            return [name for name, sees in answers.items() if not sees]

    def cannot_write(self, indices: Iterable[int], folder: Path) -> dict[str, str]:
        """Return by name why files cannot be written to ``folder``, of those hosts on which it is
        so."""
        far = [self[index] for index in indices if self[index].agent is not None]
        asked = {host.name: host.agent.cannot_write.call_one(folder) for host in far}
        answers = _wait_for_all(asked, time.monotonic() + _AGENT_TIMEOUT_S, self._field)
        return {name: why for name, why in answers.items() if why}

    def far(self) -> list[Host]:
        return [host for host in self._hosts if host.agent is not None]

    def lose(self, host: Host) -> None:
        host.lost.set()
        now_s = time.monotonic()
        self._lost[host.index] = _Lost(now_s, due_s=now_s + _SETTLE_S)

    async def attach_again(self, index: int) -> Host | None:
        """Try to attach a lost host. Returns None if its worker does not listen, if no attempt is
        due, or if the worker has not yet ended what this run left there.

        An attempt is due `_SETTLE_S` after the worker began to listen. After failed attempts there
        are pauses, which double from `_PAUSE_S` to `_MAX_PAUSE_S`.

        Raises:
            NotAttachedError: the attempt has failed.
            HostsBusyError: the host's worker serves another run now.
            ConfigError: the host has other code or another policy than before.
        """
        name, lost = self._hosts[index].name, self._lost[index]
        is_there = await asyncio.to_thread(accepts, name)
        now_s = time.monotonic()
        if not is_there:
            self._lost[index] = _Lost(now_s, due_s=now_s + _SETTLE_S)
        if not is_there or now_s < lost.due_s:
            return None
        try:
            self._hosts[index] = await self._attached(index, name)
        except HostsBusyError:
            now_s = time.monotonic()
            if now_s < lost.away_s + _OLD_INCARNATION_S:
                lost.due_s = now_s + _BUSY_PAUSE_S
                return None
            lost.pause()
            raise
        except _ATTACH_ERRORS as error:
            lost.away_s = time.monotonic()  # the failed attempt may have claimed the worker
            cause = shorten(str(error), _MAX_CAUSE) or "no answer"
            raise NotAttachedError(
                f"was not attached ({cause}); it is tried again in {lost.pause():.0f} s"
            ) from error
        return self._hosts[index]

    async def _attached(self, index: int, name: str) -> Host:
        wanted = self._wanted
        assert wanted is not None
        async with asyncio.timeout(_AGAIN_TIMEOUT_S + digest_limit_s(wanted.here.policy_dir)):
            mesh = await _contact_again(name)
            await mesh.initialized
            agent = _spawn_agent(mesh, name)
            answer = await agent.answer.call_one(wanted.checkpoint)
        why: Exception | None = refusal(wanted.here, {name: answer})
        if answer.policy_error and not answer.is_busy:
            why = OSError(answer.policy_error)  # perhaps its storage is not mounted yet
        if why:
            with suppress(*_ATTACH_ERRORS):
                await asyncio.wait_for(agent.end_run.call_one(), _AGENT_TIMEOUT_S)
            raise why
        return _far_host(index, name, mesh, agent, answer)

    def detach(self) -> None:
        """End the run's processes on the other hosts, and wait for that. The workers stay."""
        leave({host.name: host.agent for host in self.far() if not host.lost.is_set()})


def leave(agents: Mapping[str, Any]) -> None:
    """Tell the workers of these hosts, through their agents, that the run has ended. Waits until
    workers with an address no longer listen for this run."""
    deadline_s = time.monotonic() + _STOP_TIMEOUT_S
    ending = [(address, agent.end_run.call_one()) for address, agent in agents.items()]
    for address, answer in ending:
        with suppress(*_ATTACH_ERRORS):
            if not answer.get(timeout=max(0.1, deadline_s - time.monotonic())):
                continue  # it serves another run
        while _is_address(address) and accepts(address) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)


def _is_address(name: str) -> bool:
    """Whether the name of a host is an address; otherwise it is a place in a job's mesh."""
    return "://" in name


async def _contact_again(address: str) -> HostMesh:
    """Attach a worker again after its process was replaced. The new process rejects this process's
    channel to the former one, and Monarch opens another channel, but loses what it sent on the
    first: so it may take several tries. Await ``initialized`` of the result."""
    await asyncio.to_thread(close_connections, Address.parse(address))
    for _ in range(_NUM_TRIES):
        await asyncio.sleep(_RESET_S)
        mesh = attach_to_workers(ca=_CA, workers=[address])
        with suppress(*_ATTACH_ERRORS):
            async with asyncio.timeout(_TRY_S):
                await mesh.initialized
            break
    return mesh


async def _contact_all_again(addresses: Sequence[str]) -> dict[str, HostMesh]:
    meshes = await asyncio.gather(*map(_contact_again, addresses))
    return dict(zip(addresses, meshes, strict=True))


def local_host(index: int = CONTROLLER_HOST, *, ip: str = "127.0.0.1") -> Host:
    return Host(index=index, name=socket.gethostname(), ip=ip, mesh=this_host())


def attach(
    launch: LaunchConfig,
    own: Address | None,
    *,
    checkpoint: str,
    here: HostAnswer,
    is_again: bool = False,
) -> Hosts:
    """Attach the workers' hosts, and compare their software and policy with those ``here``. Call
    this before any other use of Monarch.

    Args:
        own: the address at which this controller listens; None if all hosts are this machine.
        checkpoint: the policy, as for `resolve_checkpoint`.
        is_again: whether this process has tried to attach these workers before.

    Raises:
        HostsBusyError: workers serve other runs.
        ConfigError: a worker does not answer, or its host has other code or another policy. No
            process is left on any host.
    """
    deadline_s = time.monotonic() + launch.attach_timeout_s
    # The agents on busy workers end. By default Monarch then ends this process, too.
    monarch.actor.unhandled_fault_hook = _ignore_fault  # until `runtime.supervise`
    if own is not None:
        enable_transport(str(own))
    far = [text for text in launch.attach if text != LOCAL]
    if is_again:
        while not all(map(accepts, far)) and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        time.sleep(_SETTLE_S)
        meshes = asyncio.run(_contact_all_again(far))
    else:
        meshes = {text: attach_to_workers(ca=_CA, workers=[text]) for text in far}
    wanted = _Wanted(checkpoint=checkpoint, here=here)
    agents, answers = _ask(meshes, _ATTACH, wanted, deadline_s)
    ip = "127.0.0.1" if own is None else own.host
    return Hosts(
        [
            local_host(index, ip=ip)
            if text == LOCAL
            else _far_host(index, text, meshes[text], agents[text], answers[text])
            for index, text in enumerate(launch.attach)
        ],
        [here.facts if text == LOCAL else answers[text].facts for text in launch.attach],
        wanted=wanted,
        ip=ip,
    )


def attach_job(
    launch: LaunchConfig,
    meshes: Mapping[str, HostMesh],
    *,
    checkpoint: str,
    here: HostAnswer,
) -> Hosts:
    """Like `attach`, for the hosts of a Monarch job, mesh by mesh. The job's workers are not ours,
    so a lost host does not return. Raises HostsBusyError, ConfigError: as `attach`."""
    deadline_s = time.monotonic() + launch.attach_timeout_s
    monarch.actor.unhandled_fault_hook = _ignore_fault  # until `runtime.supervise`
    single = {
        f"{name}[{index}]": mesh.flatten("hosts").slice(hosts=slice(index, index + 1))
        for name, mesh in meshes.items()
        for index in range(len(mesh))
    }
    wanted = _Wanted(checkpoint=checkpoint, here=here)
    agents, answers = _ask(single, "launch.job", wanted, deadline_s)
    return Hosts(
        [
            _far_host(index, name, single[name], agents[name], answers[name])
            for index, name in enumerate(single)
        ],
        [
            replace(answer.facts, address="", mesh=name.rpartition("[")[0])
            for name, answer in answers.items()
        ],
        field="launch.job",
    )


def _ask(
    meshes: Mapping[str, HostMesh], field: str, wanted: _Wanted, deadline_s: float
) -> tuple[dict[str, Any], dict[str, HostAnswer]]:
    agents: dict[str, Any] = {}
    try:
        _wait_for_all({name: mesh.initialized for name, mesh in meshes.items()}, deadline_s, field)
        for name, mesh in meshes.items():
            agents[name] = _spawn_agent(mesh, name)
        asked = {name: agent.answer.call_one(wanted.checkpoint) for name, agent in agents.items()}
        limit_s = deadline_s + digest_limit_s(wanted.here.policy_dir)
        answers = _wait_for_all(asked, limit_s, field)
        if found := refusal(wanted.here, answers, field):
            raise found
    except BaseException:
        leave(agents)
        raise
    return agents, answers


def _ignore_fault(failure: Any) -> None:
    logger.debug("while attaching: %s", failure)


def _far_host(index: int, name: str, mesh: HostMesh, agent: Any, answer: HostAnswer) -> Host:
    return Host(
        index=index,
        name=name,
        ip=Address.parse(name).host if _is_address(name) else answer.ip,
        mesh=mesh.slice(hosts=0),
        agent=agent,
        policy_dir=answer.policy_dir,
    )


def refusal(
    here: HostAnswer, answers: Mapping[str, HostAnswer], field: str = _ATTACH
) -> ConfigError | None:
    """Return the error if some hosts, named in ``field``, cannot be used."""
    errors = {text: answer_errors(text, here, there, field) for text, there in answers.items()}
    texts = [text for of_one in errors.values() for text in of_one]
    if not texts:
        return None
    refused = [text for text, of_one in errors.items() if of_one]
    if all(answers[text].is_busy for text in refused):
        return HostsBusyError(texts, refused)
    return ConfigError(texts)


def answer_errors(
    address: str, here: HostAnswer, there: HostAnswer, field: str = _ATTACH
) -> list[str]:
    """Return one message for each forbidden difference between a host and ``here``."""
    if there.is_busy:
        other = "start a worker" if field == _ATTACH else "apply another job"
        return [f"{field}: {address} serves another run; wait for its end, or {other}"]
    errors = [
        f"{field}: {address} has {difference}; install the same on both"
        for difference in differences(here.installed, there.installed)
    ]
    if there.policy_error:
        return [*errors, f"{field}: on {address}, {there.policy_error}"]
    if there.policy != here.policy:
        errors.append(
            f"{field}: {address} has another model in {there.policy_dir} "
            f"({there.policy[:12]}) than the controller in {here.policy_dir} "
            f"({here.policy[:12]}); copy the policy there"
        )
    return errors


@dataclass(frozen=True, slots=True, kw_only=True)
class FarProcesses:
    """Processes on another host, as `Processes`. The host's agent has handles of them."""

    host: Host
    mark: str

    @property
    def are_lost(self) -> bool:
        return self.host.lost.is_set()

    async def wait_until_lost(self, name: str) -> NoReturn:
        try:
            raise await self.host.agent.loss.call_one(self.mark, name)
        except (ActorError, SupervisionError):
            await asyncio.Event().wait()  # `HostWatch` reports the loss of the host
            raise

    async def end(self, timeout_s: float) -> list[int]:
        answer = self.host.agent.end.call_one(self.mark, timeout_s)
        try:
            return list(await asyncio.wait_for(answer, 2 * timeout_s + _AGENT_TIMEOUT_S))
        except (TimeoutError, ActorError, SupervisionError) as error:
            if not self.are_lost:  # by now
                name, cause = self.host.name, error or "no answer"
                logger.warning("%s: whether its processes have ended is unknown: %s", name, cause)
            return []


HeldProcesses = Processes | FarProcesses


def _spawn_agent(mesh: HostMesh, address: str) -> Any:
    process = mesh.slice(hosts=0).spawn_procs(
        per_host={"ranks": 1}, name="agent", bootstrap_command=start_command({})
    )
    return process.spawn("agent", HostAgent, address).slice(ranks=0)


def _wait_for_all(answers: Mapping[str, Any], deadline_s: float, field: str) -> dict[str, Any]:
    """Wait for the answer of each host in ``field``; raise one ConfigError for all that do not
    answer."""
    found, errors = {}, []
    for address, answer in answers.items():
        try:
            found[address] = answer.get(timeout=max(0.1, deadline_s - time.monotonic()))
        except TimeoutError:
            why = "does its worker run, and can it reach this machine?"
            if field == _ATTACH:
                why = (
                    f"is `torchtitan-rl worker --address {address}` running there, is the port "
                    "open, and can it reach this machine at launch.address?"
                )
            errors.append(f"{field}: {address} does not answer; {why}")
        except (ActorError, SupervisionError, RuntimeError, ValueError, OSError) as error:
            errors.append(f"{field}: {address} failed: {' '.join(str(error).split())}")
    if errors:
        raise ConfigError(errors)
    return found
