"""``torchtitan-rl view RUN_DIR...``: shows runs on a page in the browser, until it is stopped.

The runs may be live, finished, or folders of evaluations (``outputs/eval/NAME``). Nothing is
written into their folders. On an address that other machines can reach, the page needs a key in the
environment variable ``TORCHTITAN_RL_PAGE_KEY``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from torchtitan_rl.config.loader import parse_options
from torchtitan_rl.errors import ConfigError, EndpointLostError
from torchtitan_rl.serving.config import listen

_FIRST_READ_S = 0.5  # before the address is printed


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
    """``torchtitan-rl view OPTIONS``; ends by a signal.

    Raises:
        ConfigError: an option is wrong, or the address is taken.
    """
    from torchtitan_rl.page.app import PAGE_KEY, Page, page_url, serve_page

    options = parse_options(ViewOptions, words, prog="torchtitan-rl view")
    if not options.runs:
        raise ConfigError("RUN_DIR: give the folder of a run")
    if missing := [one for one in options.runs if not one.is_dir()]:
        raise ConfigError([f"{one}: no such folder" for one in missing])
    if not 0 <= options.port <= 65535:
        raise ConfigError(f"--port is {options.port}: give 0 (a free one) to 65535")
    try:
        listening = listen(options.host, options.port, backlog=128)
    except EndpointLostError as error:
        cause = error.__cause__
        raise ConfigError(f"--host {options.host} --port {options.port}: {cause}") from error
    key = os.environ.get(PAGE_KEY, "")
    page = Page([one.absolute() for one in options.runs])
    page.read(seconds=_FIRST_READ_S)
    print(page_url(options.host, listening.getsockname()[1]), flush=True)
    serve_page(page, listening, host=options.host, key=key)
    return 0
