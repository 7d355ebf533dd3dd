"""The page while a run writes: it follows without a reload, and it survives a restart of its
server."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.conftest import Viewed, Watched
from tests.real.runs import Run, options

Visit = Callable[..., Watched]
SOON_MS = 20_000


def first_lines(path: Path, count: int) -> tuple[str, str]:
    lines = path.read_text().splitlines(keepends=True)
    return "".join(lines[:count]), "".join(lines[count:])


def state_of(seen: Watched) -> str:
    return str(seen.page.inner_text("header .state"))


@pytest.fixture
def growing(tmp_path: Path, recorded: Path) -> tuple[Path, str]:
    """A run whose last metrics are still to come, and these rows."""
    run = tmp_path / "growing"
    shutil.copytree(recorded, run)
    begun, rest = first_lines(run / "metrics.jsonl", 3)
    (run / "metrics.jsonl").write_text(begun)
    return run, rest


def test_new_rows_appear_without_a_reload(
    view: Callable[..., Viewed], visit: Visit, growing: tuple[Path, str]
) -> None:
    run, rest = growing
    last = max(json.loads(line)["step"] for line in rest.splitlines())
    seen = visit(view(run).url)
    seen.go("#/overview")
    seen.page.evaluate("() => { window.isTheSame = true; }")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(rest)
    pattern = f"step {last}"
    seen.page.wait_for_function(
        "text => document.querySelector('header .state').textContent.includes(text)",
        arg=pattern,
        timeout=SOON_MS,
    )
    assert seen.page.evaluate("() => window.isTheSame")


def test_the_page_survives_a_restart_of_its_server(
    view: Callable[..., Viewed], visit: Visit, growing: tuple[Path, str]
) -> None:
    run, rest = growing
    last = max(json.loads(line)["step"] for line in rest.splitlines())
    served = view(run)
    seen = visit(served.url)
    seen.go("#/overview")
    port = served.port
    served.stop()
    seen.page.get_by_text("Reconnecting").wait_for(timeout=SOON_MS)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(rest)
    served.start(port)
    seen.page.wait_for_function(
        "text => document.querySelector('header .state').textContent.includes(text)",
        arg=f"step {last}",
        timeout=SOON_MS,
    )
    seen.errors.clear()  # the browser reports the lost connection itself


@pytest.mark.soak
def test_a_real_run_is_seen_while_it_trains(visit: Visit, tmp_path: Path) -> None:
    log = tmp_path / "log"
    run = Run(options(tmp_path, "run", "--num-steps", "40", "--page"), log=log)
    run.wait_until(lambda: "http://" in log.read_text(), "the URL of the page")
    first = log.read_text().splitlines()[0]
    seen = visit(re.search(r"http://\S+?(?=[\s,;]|$)", first)[0].rstrip("/") + "/")  # type: ignore[index]
    seen.go("#/now")
    seen.page.locator("main table").get_by_text("replica1").first.wait_for(timeout=120_000)
    steps = set()
    for _ in range(2):
        before = state_of(seen)
        seen.page.wait_for_function(
            "before => document.querySelector('header .state').textContent !== before",
            arg=before,
            timeout=60_000,
        )
        steps.add(state_of(seen))
    assert len(steps) == 2
    seen.page.close()  # the server ends with its run
    run.require_success()
