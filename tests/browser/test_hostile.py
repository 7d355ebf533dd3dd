"""What a policy wrote is text on the page and in a report, whatever it is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.conftest import Viewed, Watched
from tests.real.runs import ROOT

Visit = Callable[..., Watched]

ATTACKS = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "</script><script>window.pwned = 1</script><!--",
    "<svg onload='window.pwned = 1'></svg><iframe srcdoc='<script>parent.pwned=1</script>'>",
    "javascript:window.pwned=1",
    "{{constructor.constructor('window.pwned=1')()}}${window.pwned=1}",
    "\u202egnp.exe \u2066 \x1b[31mred\x07 \x00 \u2028 \u2029 \ufeff",
    "<style>*{display:none}</style><base href='http://evil.example/'>",
    "x" * 1_000_000,
]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory, recorded: Path) -> Path:
    """The recorded run, with each attack in every text of a rollout."""
    run = tmp_path_factory.mktemp("attacked") / "run"
    shutil.copytree(recorded, run)
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    for row, attack in zip(rows, ATTACKS, strict=False):
        row |= {"problem_id": attack[:300], "cause": attack, "problem": {attack[:300]: attack}}
        row["messages"] = [{"role": attack[:300], "content": attack}, *row["messages"]]
        row["metrics"] = {attack[:300]: 1.0}
        for turn in row["turns"]:
            turn |= {"text": attack, "replica": attack[:300], "stop_reason": attack[:300]}
    lines = [json.dumps(row).encode() for row in rows]
    lines[len(ATTACKS)] = lines[len(ATTACKS)].replace(b"user", b"us\xff\xfe\xed\xa0\x80er")
    (run / "rollouts.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return run


def require_inert(seen: Watched) -> None:
    assert seen.page.evaluate("() => window.pwned === undefined")
    assert seen.page.evaluate("() => document.querySelector('main iframe, main base') === null")


@pytest.fixture(scope="module")
def served(view: Callable[..., Viewed], attacked: Path) -> Viewed:
    return view(attacked)


@pytest.mark.parametrize("n", range(1, len(ATTACKS) + 2))
def test_hostile_content_is_text_on_the_page(served: Viewed, visit: Visit, n: int) -> None:
    seen = visit(served.url)
    for route in (f"#/rollouts/{n}", f"#/rollouts/{n}?show=tokens", "#/rollouts"):
        seen.go(route)
        seen.page.wait_for_timeout(100)
        require_inert(seen)
        assert seen.page.locator("main").is_visible()
    if n <= 2:
        seen.go(f"#/rollouts/{n}")
        assert ATTACKS[n - 1] in seen.page.inner_text("main")


def test_hostile_content_is_text_in_a_report(visit: Visit, attacked: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    words = [sys.executable, "-m", "torchtitan_rl.commands.cli", "report", str(attacked)]
    subprocess.run([*words, "-o", str(report)], cwd=ROOT, check=True)
    seen = visit(report.as_uri(), offline=True)
    for route in ("#/overview", "#/rollouts", *(f"#/rollouts/{n}" for n in range(1, 11))):
        seen.go(route)
        require_inert(seen)
