"""``torchtitan-rl view RUN_DIR...``: shows runs on a page in the browser, until it is stopped. Also
``--page`` of other commands, which shows their own run.

The runs may be live, finished, or folders of evaluations (``outputs/eval/NAME``). Nothing is
written into their folders. On an address that other machines can reach, the page needs a key in the
environment variable ``TORCHTITAN_RL_PAGE_KEY``.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from torchtitan_rl.config.loader import parse_options
from torchtitan_rl.errors import ConfigError, EndpointLostError
from torchtitan_rl.processes import end_with_parent
from torchtitan_rl.serving.config import is_loopback, listen, reachable

_FIRST_READ_S = 0.5  # before the address is printed
PAGE_KEY = "TORCHTITAN_RL_PAGE_KEY"
PAGE_HELP = """\
  --page            show the run on a page in the browser (see torchtitan-rl view --help), on a free
                    port of 127.0.0.1; --page=HOST:PORT listens there
"""
_OPTION = "--page"
_NICENESS = 10
_END_S = 3.0


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Show runs on a page in the browser: whether they learn, what they wrote, where their time
    goes. The page follows a run that is live, and never writes into a run's folder."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR...")]
    """Folders of runs or evaluations, live or finished."""
    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines can reach needs a key in the
    environment variable TORCHTITAN_RL_PAGE_KEY."""
    port: int = 0
    """Port to listen on; 0 takes a free one."""


def main(words: Sequence[str]) -> int:
    options = parse_options(ViewOptions, words, prog="torchtitan-rl view")
    if not options.runs:
        raise ConfigError("RUN_DIR: give the folder of a run")
    if missing := [one for one in options.runs if not one.is_dir()]:
        raise ConfigError([f"{one}: no such folder" for one in missing])
    address = PageAddress(host=options.host, port=options.port)
    with address.opened(f"--host {options.host} --port {options.port}") as listening:
        _serve(address, listening, [one.absolute() for one in options.runs])
    return 0


def _serve(address: PageAddress, listening: socket.socket, folders: Sequence[Path]) -> None:
    from torchtitan_rl.page.app import Page, serve_page

    page = Page(folders)
    page.read(seconds=_FIRST_READ_S)
    print(f"page: {address.url(listening)}", flush=True)
    serve_page(page, listening, host=address.host, key=os.environ.get(PAGE_KEY, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAddress:
    """Where a page listens; port 0 is a free one."""

    host: str = "127.0.0.1"
    port: int = 0

    @classmethod
    def of(cls, words: Sequence[str]) -> tuple[PageAddress | None, list[str]]:
        """Take ``--page`` or ``--page=HOST:PORT`` from a command's words. Also returns the other
        words; None if there is no such word. Raises ConfigError."""
        given = [word for word in words if word.partition("=")[0] == _OPTION]
        rest = [word for word in words if word not in given]
        if not given:
            return None, rest
        if given == [_OPTION]:
            return cls(), rest
        host, _, port = given[0].partition("=")[2].rpartition(":")
        if len(given) > 1 or not host or not port.isdecimal():
            raise ConfigError(f"{_OPTION}: give it once, as {_OPTION} or {_OPTION}=HOST:PORT")
        return cls(host=host.strip("[]"), port=int(port)), rest

    def url(self, listening: socket.socket) -> str:
        return f"http://{reachable(self.host)}:{listening.getsockname()[1]}/"

    @contextmanager
    def opened(self, option: str = _OPTION) -> Iterator[socket.socket]:
        """Listen while the block is open. Raises ConfigError, which names ``option``, if the
        address is taken or wrong, or needs a key."""
        if not os.environ.get(PAGE_KEY) and not is_loopback(self.host):
            raise ConfigError(
                f"{option}: other machines can reach {self.host}: set {PAGE_KEY}, or listen on "
                "127.0.0.1"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"{option}: the port is {self.port}: give 0 (a free one) to 65535")
        try:
            listening = listen(self.host, self.port, backlog=128)
        except EndpointLostError as error:
            raise ConfigError(f"{option}: {error.__cause__}") from error
        with listening:
            yield listening


@contextmanager
def page_of_run(address: PageAddress | None) -> Iterator[Callable[[Path, Path], str]]:
    """Listen for the page of a run while the block is open. Yields a function that gets the run's
    folder and the folder of its logs, serves the page in a process of its own until the block ends,
    and returns the text for the run's first line; empty without an address.

    Enter the block before anything is written, so that a taken address leaves nothing behind: it
    raises ConfigError. The process's messages are in ``page.log``.
    """
    with ExitStack() as stack:
        listening = None if address is None else stack.enter_context(address.opened())

        def start(run_dir: Path, log_dir: Path) -> str:
            if address is None or listening is None:
                return ""
            url = address.url(listening)
            log_dir.mkdir(parents=True, exist_ok=True)
            # From now on, only the page's process listens.
            with listening, (log_dir / "page.log").open("ab") as log:
                process = subprocess.Popen(
                    [*_CHILD, address.host, str(listening.fileno()), str(run_dir.absolute())],
                    pass_fds=[listening.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=lambda: end_with_parent(signal.SIGTERM),
                )
            stack.callback(_end, process)
            return f"; page {url}"

        yield start


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    process.kill()
    process.wait()


_CHILD = [sys.executable, "-P", "-m", "torchtitan_rl.commands.view"]


def serve_child() -> None:
    """Serve the page of a run on a socket that the run's process opened."""
    from torchtitan_rl.launch.own_user import use_private_folder

    host, number, folder = sys.argv[1:]
    use_private_folder()
    os.nice(_NICENESS)
    _serve(PageAddress(host=host), socket.socket(fileno=int(number)), [Path(folder)])


if __name__ == "__main__":
    serve_child()
