"""A report: one file that opens from disk, with no network, with the same views."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.conftest import Watched, rewards_of
from tests.real.runs import ROOT

Visit = Callable[..., Watched]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory, recorded: Path) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    words = [sys.executable, "-m", "torchtitan_rl.commands.cli", "report", str(recorded)]
    subprocess.run([*words, "-o", str(path)], cwd=ROOT, check=True)
    return path


def test_a_report_is_one_small_file(report: Path) -> None:
    assert report.stat().st_size < 5_000_000


VIEWS = {
    "overview": "Does it learn?",
    "curves": "Reward in training",
    "rollouts": "rollouts",
    "timeline": "Who works, who waits",
    "config": "rollout.group_size",
}


def test_a_report_has_the_views_without_a_server(visit: Visit, report: Path) -> None:
    """That axe finds no fault in them: test_views.py."""
    seen = visit(report.as_uri(), offline=True)
    for route, text in VIEWS.items():
        seen.go(f"#/{route}")
        seen.shows(text)


def test_a_report_filters_and_opens_rollouts(visit: Visit, report: Path) -> None:
    seen = visit(report.as_uri(), offline=True)
    seen.go("#/rollouts?split=train&sort=-reward")
    rewards = rewards_of(seen)
    assert rewards == sorted(rewards, reverse=True)
    seen.page.locator("table.rollouts tbody a").first.click()
    seen.shows("Conversation")
