"""Attaching a command to the hosts of its configuration, before anything is planned."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.prepare import PreparedRun, prepare_run
from torchtitan_rl.config.run import LaunchConfig, RunConfig, existing_parent
from torchtitan_rl.errors import ConfigError, HostsBusyError
from torchtitan_rl.launch.addresses import LOCAL, Address
from torchtitan_rl.launch.interfaces import accepts, free_port, why_not_listen
from torchtitan_rl.launch.monarch_environment import set_monarch_environment
from torchtitan_rl.launch.workers import CONTROLLER_LOST_S, find_lives

if TYPE_CHECKING:
    from torchtitan_rl.backends.monarch.hosts import Hosts

_Attached = TypeVar("_Attached")

_START_S = 15.0  # for workers that are started at the same time
_LOOK_S = 1.0


class Attachment:
    """The hosts that a run is attached to: none until `ask`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.hosts: Hosts | None = None

    def ask(self, policy_dir: Path) -> tuple[HostFacts, ...]:
        """Attach to them, and return what they have; see `AskHosts`."""
        launch = self._config.launch
        own = _own_address(launch)
        far = [text for text in launch.attach if text != LOCAL]
        lives: dict[str, str] = {}
        if own is not None:
            if why := why_not_listen(own):
                raise ConfigError(
                    f"launch.address is '{own}': this process cannot listen there ({why}); give "
                    "an address of this machine, and a free port"
                )
            from torchtitan_rl.launch.keys import own_folder  # loads cryptography
            from torchtitan_rl.launch.probe import probe_errors

            set_monarch_environment(launch.keys, own, field="launch.keys")
            lives = find_lives(far)
            workers = [Address.parse(text) for text in lives.values()]
            folder = None if launch.keys is None else own_folder(launch.keys, own.host)
            if errors := probe_errors("launch.attach", workers, folder, wait_s=_START_S):
                raise ConfigError(errors)
        with silent_libraries():
            from torchtitan_rl.backends.monarch.host_agent import describe_host  # seconds
            from torchtitan_rl.backends.monarch.hosts import attach

            given = self._config.policy.checkpoint
            checkpoint = str(policy_dir) if Path(given).exists() else given
            here = describe_host(LOCAL, checkpoint)
            self.hosts = attach_once_free(
                lambda lives: attach(launch, own, lives=lives, checkpoint=checkpoint, here=here),
                lives,
                lambda: find_lives(far),
            )
        return self.hosts.facts

    def prepare(self) -> PreparedRun:
        """See `prepare_run` and `require_folders`."""
        prepared = prepare_run(self._config, ask_hosts=self.ask)
        if not prepared.is_complete:
            self.require_folders(prepared)
        return prepared

    def require_folders(self, prepared: PreparedRun) -> None:
        """All processes write logs into the run's folder, and the trainer checkpoints, which the
        controller reads.

        Raises:
            ConfigError: a host of the plan cannot write there, or one of the trainer has another
                folder of that name, or none.
        """
        config, plan = prepared.config, prepared.plan
        if self.hosts is None or plan.trainer is None:
            return
        indices = [part.host for part in plan.trainer.on_each_host()]
        used = {*indices, *(group.host for group in plan.replicas)}
        if unwritable := self.hosts.cannot_write(sorted(used), config.log_dir.absolute()):
            raise ConfigError(
                [
                    f"output_dir is {config.output_dir}: on {host}, {why}; give another"
                    for host, why in unwritable.items()
                ]
            )
        folder = existing_parent(config.run_dir)
        if apart := self.hosts.without_folder(indices, folder):
            raise ConfigError(
                f"output_dir is {config.output_dir}: {', '.join(apart)}, where the trainer writes "
                "checkpoints, has another folder of that name or none; give one on storage that "
                "both have, or a launch.trainer_hosts that is local"
            )


@contextmanager
def attachment(config: RunConfig) -> Iterator[Attachment]:
    """Whatever it attaches to is left at the end, and can be used by the next run."""
    attached = Attachment(config)
    try:
        yield attached
    finally:
        if attached.hosts is not None:
            attached.hosts.detach()


def attach_once_free(
    attach: Callable[[Mapping[str, str]], _Attached],
    lives: Mapping[str, str],
    find: Callable[[], Mapping[str, str]],
    *,
    within_s: float = CONTROLLER_LOST_S + 10.0,
) -> _Attached:
    """Attach to workers where they listen (``lives``). Those that serve another run may be left by
    a lost controller: they are waited for, and attached where ``find`` then finds them.

    Raises:
        ConfigError: they cannot be attached; `HostsBusyError`: not within this time, or not by this
            process.
    """
    deadline_s = time.monotonic() + within_s
    tried: set[str] = set()  # Monarch attaches none of them again
    ended: set[str] = set()  # of these, where it no longer was the same life
    while True:
        try:
            return attach(lives)
        except HostsBusyError as error:
            if not tried:
                print("waiting for workers that serve another run", file=sys.stderr)
            tried.update(lives.values())
            while not (tried.isdisjoint(lives.values()) and all(map(accepts, lives.values()))):
                ended.update(one for one in tried if not accepts(one))
                free = {worker for worker, one in lives.items() if one not in tried - ended}
                if free == lives.keys() and all(map(accepts, lives.values())):
                    raise HostsBusyError(
                        "launch.attach: all workers are free by now, and this process cannot use "
                        "an address twice; start the command again"
                    ) from error
                if time.monotonic() >= deadline_s:
                    raise error
                time.sleep(_LOOK_S)
                lives = find()


def _own_address(launch: LaunchConfig) -> Address | None:
    """Where this controller listens; None where all hosts are this machine."""
    if launch.address:
        return Address.parse(launch.address)
    schemes = {Address.parse(text).scheme for text in launch.attach} - {"local"}
    if not schemes:
        return None
    return Address(scheme=schemes.pop(), host="127.0.0.1", port=free_port())


@contextmanager
def silent_libraries() -> Iterator[None]:
    """What native code writes to the console meanwhile is dropped (Monarch has a log of its own);
    what this program says is not."""
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.flush()
    saved = [os.dup(standard) for standard in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for standard in (1, 2):
            os.dup2(nowhere, standard)
        sys.stdout, sys.stderr = (os.fdopen(copy, "w", 1, closefd=False) for copy in saved)
        yield
    finally:
        sys.stdout, sys.stderr = streams
        os.close(nowhere)
        for standard, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, standard)
            os.close(copy)
