"""How ``torchtitan-rl scale`` reaches a run, and that no other user does."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.other_user import as_other_user, needs_root, reach
from torchtitan_rl.commands import scale
from torchtitan_rl.commands.cli import main
from torchtitan_rl.commands.console import print_error
from torchtitan_rl.commands.scale import scaling_socket
from torchtitan_rl.errors import ConfigError, ReplicaError, TorchtitanRLError


class Run:
    """Has what it is asked for once ``may_end``."""

    scaling_waits_for = "replica1 to leave"

    def __init__(self, *, error: Exception | None = None, may_end: bool = True) -> None:
        self.asked: list[int] = []
        self.error = error
        self.may_end = asyncio.Event()
        if may_end:
            self.may_end.set()

    async def scale(self, number: int) -> str:
        self.asked.append(number)
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return f"{number} replicas"


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    (tmp_path / "launch.json").write_text("{}")
    monkeypatch.setattr(scale, "use_private_folder", lambda: tmp_path)
    monkeypatch.setattr(scale, "_SAY_S", 0.01)
    return tmp_path


def command(run_dir: Path, number: int = 3) -> asyncio.Task[int]:
    def run() -> int:
        try:
            return scale.main([str(run_dir), "--replicas", str(number)])
        except TorchtitanRLError as error:
            return print_error(error)

    return asyncio.create_task(asyncio.to_thread(run))


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (None, 0, "3 replicas\n"),
        (ConfigError("no free device"), 2, "error: no free device\n"),
        (ReplicaError("one died"), 1, "error: ReplicaError: one died\n"),
        (RuntimeError("a bug"), 1, "error: ReplicaError: a bug\n"),
    ],
)
def test_the_command_says_how_it_ended(run_dir, capsys, error, code, said):
    async def play():
        run = Run(error=error)
        async with scaling_socket(run_dir, run):
            assert await command(run_dir) == code
        assert run.asked == [3]

    asyncio.run(play())
    shown = capsys.readouterr()
    assert shown.out + shown.err == said


def test_it_waits_says_for_what_and_gives_up_while_the_run_goes_on(run_dir, capsys, monkeypatch):
    async def play():
        run = Run(may_end=False)
        async with scaling_socket(run_dir, run):
            monkeypatch.setattr(scale, "_TIMEOUT_S", 0.1)
            assert await command(run_dir) == 1
            monkeypatch.setattr(scale, "_TIMEOUT_S", 60.0)
            ended = command(run_dir, 2)
            while run.asked != [3, 2]:
                await asyncio.sleep(0.01)
        assert await ended == 1

    asyncio.run(play())
    shown = capsys.readouterr()
    assert "waiting for replica1 to leave\n" in shown.out
    first, second = shown.err.splitlines()
    assert first == (
        "error: DeadlineError: not done within 0 s; the run goes on, and waits for "
        "replica1 to leave"
    )
    assert second.startswith("error: ReplicaError: the run")


def test_where_no_run_listens_the_command_says_so(run_dir, capsys):
    async def play():
        async with scaling_socket(run_dir, Run()):
            pass
        assert await command(run_dir) == 2

    asyncio.run(play())
    assert "no run of this folder runs on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    "sent",
    [
        b"\n",
        b"{}\n",
        b'{"replicas": "3"}\n',
        b"[" * 4000 + b"\n",
        b"[" * 1000 + b"\n",
        b"\xff\n",
        b"3\n",
        b"x" * 9000,
    ],
)
def test_any_other_request_is_refused(run_dir, sent, monkeypatch):
    monkeypatch.setattr(scale, "_READ_S", 0.2)

    async def play():
        run = Run()
        async with scaling_socket(run_dir, run):
            path = json.loads((run_dir / "launch.json").read_text())["scaling"]
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(sent)
            answer = json.loads(await reader.readline())
            writer.close()
        assert answer.keys() == {"refused"}
        assert run.asked == []

    asyncio.run(play())


@needs_root
def test_another_user_cannot_connect_and_is_refused_where_it_could(run_dir, monkeypatch):
    """The socket's mode and folder keep others out, and so does the kernel's word for who they
    are."""

    async def play(folder: Path):
        monkeypatch.setattr(scale, "use_private_folder", lambda: folder)
        run = Run()
        async with scaling_socket(run_dir, run):
            path = json.loads((run_dir / "launch.json").read_text())["scaling"]
            assert Path(path).stat().st_mode & 0o777 == 0o600
            sent = b'{"replicas": 1}\n'

            def attack() -> str:
                return reach(socket.AF_UNIX, path, sent)

            assert await asyncio.to_thread(as_other_user, attack) == "refused"
            folder.chmod(0o755)
            assert await asyncio.to_thread(as_other_user, attack) == "refused"
            Path(path).chmod(0o666)
            assert await asyncio.to_thread(as_other_user, attack) == "closed"
        assert run.asked == []

    with TemporaryDirectory(dir="/tmp") as folder:
        asyncio.run(play(Path(folder)))


@needs_root
def test_the_command_does_not_talk_to_a_socket_of_another_user(run_dir, capsys, monkeypatch):
    monkeypatch.setattr(scale.os, "geteuid", lambda: 12345)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run_dir / "socket"))
        listener.listen()
        (run_dir / "launch.json").write_text(json.dumps({"scaling": str(run_dir / "socket")}))
        assert main(["scale", str(run_dir), "--replicas", "2"]) == 2
    assert "the run is another user's" in capsys.readouterr().err
