"""``--page``: the page of a run while it runs, with simulated trainer and replicas."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fast.commands.test_console import Train
from torchtitan_rl.commands.cli import main
from torchtitan_rl.observability.page_files import LAUNCH_FILE, NOW_FILE, NowFile

_WAIT_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Train]:
    run = Train(tmp_path, "--num-steps", "400", "--page")
    run.wait_for("; page http://127.0.0.1:")
    yield run
    if run._process.poll() is None:
        run.kill()
        run.wait()


def url_of(run: Train) -> str:
    found = re.search(r"; page (http://127\.0\.0\.1:\d+/)$", run.lines()[0])
    assert found is not None
    return found[1]


def ask(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}api/runs/0/{path}", timeout=_WAIT_S) as answer:
        return json.load(answer)


def page_process(run: Train) -> psutil.Process:
    children = psutil.Process(run._process.pid).children()
    (found,) = (one for one in children if "torchtitan_rl.commands.view" in one.cmdline())
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _WAIT_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_the_page_of_a_run_follows_it_and_ends_with_it(
    run: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    url = url_of(run)
    wait_until(lambda: ask(url, "overview")["step"] >= 2)
    wait_until(lambda: ask(url, "now")["rollouts"]["total"] > 0)
    now, overview, config = (ask(url, view) for view in ("now", "overview", "config"))
    assert now["is_live"]
    assert {one["name"] for one in now["replicas"]} == {"replica0", "replica1"}
    assert set(now["groups"]) == {"waiting", "running", "finished", "batched", "capacity"}
    assert "replica0 " in now["chain"]
    assert overview["phase"]
    assert overview["num_steps"] == 400
    assert overview["eta_s"] > 0
    assert config["command"].startswith("torchtitan-rl train ")
    assert config["resume_command"].endswith("--page --checkpoint.resume")
    assert config["versions"]["torch"]
    seen = overview["step"]
    wait_until(lambda: ask(url, "overview")["step"] > seen)
    assert ask(url, "rollouts")["total"] > 0
    # What only the page reads is gone, or not counted, after the run.
    assert (run.run_dir / NOW_FILE).exists()
    process = page_process(run)
    run.ctrl_c()
    assert run.wait() == 130
    assert not (run.run_dir / NOW_FILE).exists()
    assert not process.is_running()
    manifest = json.loads((run.run_dir / "manifest.json").read_text())
    assert not {NOW_FILE, LAUNCH_FILE} & manifest["files"].keys()
    (run.run_dir / LAUNCH_FILE).write_text("changed")
    assert main(["audit", str(run.run_dir)]) == 0, capsys.readouterr().out


def test_a_run_goes_on_without_its_page(run: Train) -> None:
    wait_until(lambda: ask(url_of(run), "overview")["is_live"])
    page_process(run).kill()
    last = len(run.lines())
    wait_until(lambda: len(run.lines()) > last + 3)
    run.ctrl_c()
    assert run.wait() == 130


def test_the_page_ends_with_a_run_that_is_killed(run: Train) -> None:
    wait_until(lambda: ask(url_of(run), "overview")["is_live"])
    process = page_process(run)
    run._process.kill()
    run.wait()
    wait_until(lambda: not process.is_running())


def test_a_folder_that_cannot_take_now_json_does_not_disturb_the_run(tmp_path: Path) -> None:
    blocked = tmp_path / "run" / NOW_FILE
    blocked.mkdir(parents=True)
    (blocked / "file").touch()
    run = Train(tmp_path, "--num-steps", "2")
    assert run.wait() == 0, run.lines()
    assert sum("the page does not show" in line for line in run.lines()) == 1


def test_values_that_are_not_text_do_not_end_the_writing_of_now_json(tmp_path: Path) -> None:
    values = iter([{"phase": "\ud800"}, {"phase": "rollout"}])
    file = NowFile(tmp_path, lambda: next(values))
    for _ in range(2):
        with contextlib.suppress(TimeoutError):
            asyncio.run(asyncio.wait_for(file.run(), 0.1))
        wait_until((tmp_path / NOW_FILE).exists)
    wait_until(lambda: json.loads((tmp_path / NOW_FILE).read_text())["phase"] == "rollout")
    file.close()


def test_a_taken_address_of_the_page_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        page = f"--page=127.0.0.1:{taken.getsockname()[1]}"
        words = ["alphabet_sort_tiny", page, "--output-dir", str(tmp_path), "--name", "run"]
        assert main(["train", *words]) == 2
    assert "Address already in use" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("page", ["--page=", "--page=127.0.0.1", "--page=:80", "--page=x:y"])
def test_a_wrong_address_of_the_page_is_one_line(
    page: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "alphabet_sort_tiny", page]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --page: give it once, as --page or --page=HOST:PORT")
