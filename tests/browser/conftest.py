"""A real browser on a real server of the page. Without Chromium or playwright these tests are
skipped; ``make test`` installs both where it may."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from tests.real.runs import ROOT

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
READY_S = 60.0


@dataclass
class Watched:
    """A browser page and what went wrong on it: requests to other machines, errors of scripts and
    of the content security policy."""

    page: Any
    url: str
    foreign: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def go(self, route: str) -> None:
        """Open a view by its URL, and wait until it is drawn."""
        self.page.goto(f"{self.url}{route}")
        self.settled()

    def settled(self) -> None:
        self.page.wait_for_selector("main[aria-busy=false]")

    def shows(self, text: str) -> None:
        """Wait for a text of the view: after a click, the view before it may be `settled`."""
        has_text = "text => document.querySelector('main').innerText.includes(text)"
        self.page.wait_for_function(has_text, arg=text)


# Until it ends, playwright's event loop counts as running: no later test could run one.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Viewed:
    """``torchtitan-rl view`` on run folders, in a process of its own."""

    def __init__(self, *folders: Path, log: Path, port: int = 0) -> None:
        self._words = [sys.executable, "-m", "torchtitan_rl.commands.cli", "view"]
        self._words += map(str, folders)
        self._log = log
        self.url = ""
        self.start(port)

    def start(self, port: int = 0) -> None:
        """Start the server; on the same port after `stop`."""
        words = [*self._words, "--port", str(port)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(words, cwd=ROOT, stdout=log, stderr=log)
        deadline = time.monotonic() + READY_S
        while (found := re.search(r"http://\S+", self._log.read_text())) is None:
            assert self._process.poll() is None, self._log.read_text()
            assert time.monotonic() < deadline, "the page does not answer"
            time.sleep(0.05)
        self.url = found[0].rstrip("/") + "/"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    def stop(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="session")
def view(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Viewed]]:
    """Starts servers, which end with the session."""
    started: list[Viewed] = []

    def start(*folders: Path) -> Viewed:
        started.append(Viewed(*folders, log=tmp_path_factory.mktemp("view") / "log"))
        return started[-1]

    yield start
    for one in started:
        one.stop()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Watched]]:
    """Opens a browser page. At the end of the test no page may have asked another machine for
    anything, or have met an error."""
    watched: list[Watched] = []
    contexts = []

    def open_page(url: str, **options: Any) -> Watched:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        one = Watched(context.new_page(), url)
        one.page.on(
            "request",
            lambda request: (
                None if request.url.startswith((url, "data:")) else one.foreign.append(request.url)
            ),
        )
        one.page.on("pageerror", lambda error: one.errors.append(str(error)))
        one.page.on(
            "console",
            lambda message: one.errors.append(message.text) if message.type == "error" else None,
        )
        watched.append(one)
        return one

    yield open_page
    for context in contexts:
        context.close()
    for one in watched:
        assert one.foreign == []
        assert one.errors == []


SCREENSHOTS = os.environ.get("SCREENSHOTS", "")
"""A folder: the tests write their pictures of the views there (docs/pictures)."""


def take_picture(page: Any, name: str) -> None:
    if SCREENSHOTS:
        page.screenshot(path=str(Path(SCREENSHOTS) / f"{name}.png"))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a real run: 6 asynchronous steps of `alphabet_sort_tiny`, 12 rollouts recorded of
    each."""
    run = tmp_path_factory.mktemp("recorded") / "sort_tiny"
    shutil.copytree(ROOT / "tests" / "support" / "recorded_run", run)
    launched = run / "launch.json"
    launched.write_text(launched.read_text().replace("ROOT/", f"{ROOT}/"))  # its policy
    return run


def rewards_of(seen: Watched) -> list[float]:
    """The rewards of the list of rollouts, as shown."""
    cells = seen.page.locator("table.rollouts tbody td[data-title=Reward]")
    return [float(text) for text in cells.all_inner_texts()]


def number_of(served: Viewed, row: Mapping[str, Any]) -> int:
    """The page's number of a recorded rollout."""
    query = urlencode({"group": row["group_id"], "step": row["step"], "limit": 100})
    with urlopen(f"{served.url}api/runs/0/rollouts?{query}") as answer:
        found = json.load(answer)["rows"]
    return next(int(one["n"]) for one in found if one["rollout_id"] == row["rollout_id"])
