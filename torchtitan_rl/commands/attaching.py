"""Attaching a command to the hosts of its configuration, before anything is planned."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_rl.config.hosts import HostFacts
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.launch.monarch_environment import set_monarch_environment

if TYPE_CHECKING:
    from torchtitan_rl.backends.monarch.hosts import Hosts


class Attachment:
    """The hosts that a run is attached to: none until `ask`."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.hosts: Hosts | None = None

    def ask(self, policy_dir: Path) -> tuple[HostFacts, ...]:
        """Attach to them, and return what they have; see `AskHosts`."""
        launch = self._config.launch
        set_monarch_environment(launch.keys)
        with silent_libraries():
            from torchtitan_rl.backends.monarch.host_agent import describe_host  # seconds
            from torchtitan_rl.backends.monarch.hosts import attach

            given = self._config.policy.checkpoint
            checkpoint = given if given.startswith("package:") else str(policy_dir)
            self.hosts = attach(
                launch, checkpoint=checkpoint, here=describe_host("local", checkpoint)
            )
        return self.hosts.facts


@contextmanager
def attachment(config: RunConfig) -> Iterator[Attachment]:
    """Whatever it attaches to is left at the end, and can be used by the next run."""
    attached = Attachment(config)
    try:
        yield attached
    finally:
        if attached.hosts is not None:
            attached.hosts.detach()


@contextmanager
def silent_libraries() -> Iterator[None]:
    """What native code writes to the console meanwhile is dropped; Monarch has a log of its own."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    saved = [os.dup(standard) for standard in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for standard in (1, 2):
            os.dup2(nowhere, standard)
        yield
    finally:
        os.close(nowhere)
        for standard, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, standard)
            os.close(copy)
