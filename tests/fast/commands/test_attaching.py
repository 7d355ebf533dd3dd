"""The console while a command attaches to its hosts."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from tests.support.far_hosts import FarAgent, far_host
from torchtitan_rl.backends.monarch.hosts import Hosts
from torchtitan_rl.commands import attaching
from torchtitan_rl.commands.attaching import Attachment, attach_once_free, silent_libraries
from torchtitan_rl.config.machine import HostFacts
from torchtitan_rl.config.plan import ProcessGroup, ProcessPlan
from torchtitan_rl.config.prepare import PreparedRun
from torchtitan_rl.config.run import LaunchConfig, RunConfig
from torchtitan_rl.configs.alphabet_sort_tiny import config as TINY
from torchtitan_rl.errors import ConfigError, HostsBusyError
from torchtitan_rl.launch.monarch_environment import _FAST_FAILURES, _RETURNS
from torchtitan_rl.serving.config import Keys

WORKER = "tcp://127.0.0.1:26600"


def test_what_native_code_writes_is_dropped_and_what_the_command_says_is_not(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = sys.stdout, sys.stderr
    with silent_libraries():
        os.write(1, b"noise")
        os.write(2, b"noise")
        print("stopped", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    os.write(1, b"after")
    assert capfd.readouterr() == ("after", "stopped\n")


def require_folders(run_dir: Path, there: Path, *, trainer: int, replica: int = 1) -> None:
    """Of a run on this machine and on a host that has the folder ``there`` in that place."""
    plan = ProcessPlan(
        device="cpu",
        replicas=(ProcessGroup(name="replica0", ranks=1, threads=1, host=replica),),
        trainer=ProcessGroup(name="trainer", ranks=1, threads=1, host=trainer),
    )
    config = replace(TINY, output_dir=run_dir, name="run")
    attachment = Attachment(config)
    attachment.hosts = Hosts([far_host(0, None), far_host(1, FarAgent(run_dir, there))])
    attachment.require_folders(
        PreparedRun(config=config, policy_dir=Path(), plan=plan, keys=Keys())
    )


class AttachedToOne(Attachment):
    """To a host that has the folder ``there`` in the place of ``here``."""

    def __init__(self, config: RunConfig, here: Path, there: Path) -> None:
        super().__init__(config)
        self._agent = FarAgent(here, there)

    def ask(self, policy_dir: Path) -> tuple[HostFacts, ...]:
        facts = HostFacts(address=WORKER, num_cores=2, memory_bytes=1 << 40)
        self.hosts = Hosts([far_host(0, self._agent)], [facts])
        return self.hosts.facts


def test_a_run_is_not_prepared_for_hosts_without_its_folder(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    launch = LaunchConfig(attach=(WORKER,), allow_plain_tcp=True)
    config = replace(TINY, output_dir=here, name="run", launch=launch)
    assert AttachedToOne(config, here, here).prepare().plan.trainer is not None
    with pytest.raises(ConfigError, match="where the trainer writes checkpoints"):
        AttachedToOne(config, here, there).prepare()


def test_a_host_that_cannot_write_into_the_run_s_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    there = tmp_path / "file"
    there.touch()
    expected = r"output_dir is .*: on tcp://10\.0\.0\.1:26600, .*/file is not a directory; give"
    with pytest.raises(ConfigError, match=expected):
        require_folders(tmp_path / "here", there, trainer=0)
    require_folders(tmp_path / "here", there, trainer=0, replica=0)  # nothing is there


def test_a_busy_worker_is_attached_again_once_it_has_ended_the_other_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    looks = iter([True, True, False, False])
    monkeypatch.setattr(attaching, "accepts", lambda address: next(looks))
    monkeypatch.setattr(attaching, "_LOOK_S", 0.0)

    def attach(is_again: bool) -> str:
        calls.append(is_again)
        if len(calls) < 3:
            raise HostsBusyError("it serves another run", [WORKER])
        return "attached"

    assert attach_once_free(attach) == "attached"
    assert calls == [False, True, True]
    assert list(looks) == []
    assert capsys.readouterr().err == "waiting for workers that serve another run\n"
    calls.clear()
    with pytest.raises(HostsBusyError, match="another run"):
        attach_once_free(attach, within_s=0.0)
    assert calls == [False]


def test_what_listens_and_is_no_worker_is_refused_before_monarch_tries_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in _FAST_FAILURES | _RETURNS:
        monkeypatch.setenv(name, "1s")  # what is set stays
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        Thread(target=greet_all, args=(server,), daemon=True).start()
        config = replace(TINY, launch=LaunchConfig(attach=(address,)))
        with pytest.raises(ConfigError, match=f"{address}.*not a worker"):
            Attachment(config).ask(Path())


def greet_all(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"220 mail")
                connection.recv(1000)
