"""How fast the page is, as a browser measures it, on a run of 1,000 steps and 50,000 rollouts.

    python -m benchmarks.page_browser [--steps 1000] [--rollouts 50] [--repeats 9] [--output FILE]

Needs Chromium and playwright (``make test`` installs both where it may). The run is made, its rows
are written by the run's own writers. Each figure is a median over the repeats:

- *first view*: from the navigation to the drawn view, in a browser without a cache;
- *search*, *filter*: from the input event to the next frame after the new rows are in the document;
- *scroll*: the longest time between two frames while the view scrolls by a screen;
- *memory*: of the server after all of this, and the size of the run's files.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
from playwright.sync_api import sync_playwright

from benchmarks.report import heading, print_table, write_report
from tests.browser.conftest import CHROMIUM, Viewed
from tests.support.made_run import made_run

_ROUTES = ("overview", "curves", "rollouts", "rollouts/40000", "timeline", "now", "config")
_DRAWN = "() => document.querySelector('main[aria-busy=false]') !== null"
_INPUT = """([name, value]) => new Promise((done) => {
    const input = document.querySelector(`[name=${name}]`);
    const list = document.querySelector('.list');
    const watch = new MutationObserver(() => {
        watch.disconnect();
        requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
    });
    watch.observe(list, {childList: true, subtree: true});
    const start = performance.now();
    input.value = value;
    input.dispatchEvent(new Event('input', {bubbles: true}));
    setTimeout(() => done(Infinity), 10000);
})"""
_SCROLL = """() => new Promise((done) => {
    let frames = 0, longest = 0, last = performance.now();
    const step = (now) => {
        longest = Math.max(longest, now - last);
        last = now;
        window.scrollBy(0, innerHeight / 6);
        frames += 1;
        if (frames < 30) requestAnimationFrame(step); else done(longest);
    };
    requestAnimationFrame(step);
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=50, help="rollouts of a step")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path("outputs/page_browser.json"))
    options = parser.parse_args()
    report = heading(options)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = made_run(Path(folder) / "run", steps=options.steps, rollouts=options.rollouts)
        served = Viewed(run_dir, log=Path(folder) / "log")
        try:
            figures = _measure(served, options.repeats)
        finally:
            served.stop()
        figures["files_MB"] = sum(one.stat().st_size for one in run_dir.glob("*.jsonl")) / 1e6
    print_table(("figure", "median"), [(name, f"{value:.1f}") for name, value in figures.items()])
    write_report(options.output, report | {"figures": figures})


def _measure(served: Viewed, repeats: int) -> dict[str, float]:
    process = psutil.Process(served.pid)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        figures = {"first_overview_ms": _first(chromium, served.url, "overview")}
        _wait_until_read(served)
        for route in _ROUTES:
            times = [_first(chromium, served.url, route) for _ in range(repeats)]
            figures[f"view_{route}_ms"] = statistics.median(times)
        page = _open(chromium, served.url, "rollouts")

        def typed(name: str, values: list[object]) -> float:
            return statistics.median(page.evaluate(_INPUT, [name, str(one)]) for one in values)

        words = [f"Ada{'' if n % 2 else ' Berta'}" for n in range(repeats)]
        figures["search_ms"] = typed("q", list(words))
        page = _open(chromium, served.url, "rollouts")
        figures["filter_ms"] = typed("step_min", [1 + 100 * n for n in range(repeats)])
        for route in ("rollouts", "curves?group=all", "timeline"):
            page = _open(chromium, served.url, route)
            times = [page.evaluate(_SCROLL) for _ in range(repeats)]
            figures[f"scroll_{route.partition('?')[0]}_ms"] = statistics.median(times)
        chromium.close()
    figures["server_MB"] = process.memory_info().rss / 1e6
    return figures


def _open(chromium: Any, url: str, route: str) -> Any:
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.goto(f"{url}#/{route}")
    page.wait_for_function(_DRAWN)
    return page


def _first(chromium: Any, url: str, route: str) -> float:
    """The time from the navigation to the drawn view, in ms, of a new browser profile."""
    page = _open(chromium, url, route)
    time_ms = float(page.evaluate("() => performance.now()"))
    page.context.close()
    return time_ms


def _wait_until_read(served: Viewed) -> None:
    while True:
        with urlopen(f"{served.url}api/runs/0/overview") as answer:
            if json.load(answer)["is_read"]:
                return
        time.sleep(0.2)


if __name__ == "__main__":
    main()
