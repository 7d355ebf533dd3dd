"""A report: one file, with answers that were taken once."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import resource
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.fast.page.pages import asked
from tests.fast.page.test_views import HOSTILE, append, rows_of
from tests.support.made_run import made_run
from torchtitan_rl.commands.cli import main


class Elements(HTMLParser):
    """The elements of a file: names and attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style") and data.strip():
            self.texts.append(data)


def report_of(run_dir: Path, *options: str) -> str:
    output = run_dir.parent / "report.html"
    assert main(["report", str(run_dir), "-o", str(output), *options]) == 0
    return output.read_text(encoding="utf-8")


def frozen(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="frozen">(.*?)</script>', text, re.S)
    assert found is not None
    answers: dict[str, Any] = json.loads(found[1])
    return answers


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("runs") / "run", steps=30, rollouts=20)


def test_a_report_has_the_answers_of_the_page(run_dir: Path) -> None:
    answers = frozen(report_of(run_dir))
    with asked(run_dir) as page:
        for view in ("overview", "config"):
            assert answers[f"/api/runs/0/{view}"] == page.get(view)
        listed = page.get("rollouts", limit=1000)
        shown = answers["/api/runs/0/rollouts"]
        assert shown["rows"] == listed["rows"]
        assert shown["total"] == listed["total"]
        for n in shown["details"]:
            one, whole = answers[f"/api/runs/0/rollouts/{n}"], page.get(f"rollouts/{n}")
            assert one["turns"] == whole["turns"]
            assert {sibling["n"] for sibling in one["siblings"]} <= set(shown["details"])
    last = [one["n"] for one in listed["rows"] if one["step"] == 30]
    assert set(last) <= set(shown["details"])
    series = answers["/api/runs/0/metrics"]["series"]["train/reward_mean"]
    assert len(series["value"]) == 30


def test_nothing_in_a_report_is_loaded_or_may_be_executed_but_its_own_script(
    run_dir: Path,
) -> None:
    page = Elements(report_of(run_dir))
    names = [name for name, _ in page.found]
    assert sorted(set(names)) == sorted(
        {"html", "head", "meta", "title", "link", "style", "body", "noscript", "script"}
    )
    assert not any("src" in attributes for _, attributes in page.found)
    assert [one["href"] for name, one in page.found if name == "link"] == ["data:,"]
    policy = next(
        one["content"] or ""
        for name, one in page.found
        if one.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    style, _, script = page.texts
    for text in (style, script):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_hostile_text_cannot_leave_the_data_of_a_report(tmp_path: Path) -> None:
    run_dir = made_run(tmp_path / "run", steps=3, rollouts=5)
    row = rows_of(run_dir / "rollouts.jsonl")[-1]
    own = {"problem": {HOSTILE: HOSTILE}, "messages": [{"role": HOSTILE, "content": HOSTILE}]}
    append(run_dir / "rollouts.jsonl", row | own | {"status": HOSTILE, "group_id": HOSTILE})
    text = report_of(run_dir)
    assert len(Elements(text).texts) == 3
    total = frozen(text)["/api/runs/0/rollouts"]["total"]
    shown = frozen(text)[f"/api/runs/0/rollouts/{total}"]
    assert shown["messages"][0]["content"] == HOSTILE.replace("\ud800", "?")
    assert "<script>alert" not in text
    assert text.count("</script>") == 2
    assert "\u2028" not in text


def test_a_report_keeps_to_its_size(tmp_path: Path) -> None:
    run_dir = made_run(tmp_path / "run", steps=500, rollouts=5)
    small, large = report_of(run_dir, "--max-mb", "1"), report_of(run_dir, "--max-mb", "3")
    assert len(small.encode()) < 1_000_000 < len(large.encode()) < 3_000_000
    answers = frozen(small)
    assert answers["/api/runs/0/rollouts"]["details"]
    series = answers["/api/runs/0/metrics"]["series"]["train/reward_mean"]["value"]
    assert 10 < len(series) < 500


@pytest.mark.parametrize(
    "words",
    [["--max-mb", "0"], ["-o", "."], ["-o", "nothing/report.html"], ["nothing"], ["--nothing"]],
)
def test_wrong_options_are_one_line(
    run_dir: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", *([] if words == ["nothing"] else [str(run_dir)]), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


def test_a_full_temporary_folder_is_one_line(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torchtitan_rl.page.rollouts._CACHE_KIB", 16)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert main(["report", str(run_dir)]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (line,) = capsys.readouterr().err.splitlines()
    assert "TMPDIR" in line


def test_a_pipe_is_written_to_and_not_replaced(run_dir: Path, tmp_path: Path) -> None:
    pipe, texts = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: texts.append(pipe.read_text()), daemon=True)
    reader.start()
    assert main(["report", str(run_dir), "-o", str(pipe)]) == 0
    assert pipe.is_fifo()
    reader.join()
    assert frozen(texts[0])["/api/runs"]


def test_a_report_of_a_run_that_has_not_written_anything_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    answers = frozen(report_of(tmp_path / "run"))
    assert answers["/api/runs/0/rollouts"]["rows"] == []
