"""Who may read the page, and what its answers allow a browser."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fast.page.pages import Asked, asked
from tests.support.made_run import made_run
from tests.support.other_user import as_other_user, needs_root
from torchtitan_rl.commands.cli import main
from torchtitan_rl.commands.view import PAGE_KEY

KEY = "correct horse"
PATHS = ["/", "/app.js", "/api/runs", "/api/runs/0/overview", "/nothing", "/api/runs/9/now"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("runs") / "run", steps=2, rollouts=5)


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Iterator[Asked]:
    with asked(run_dir) as one:
        yield one


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_forbids_what_a_page_could_be_made_to_do(page: Asked, path: str) -> None:
    answer = page.send(path)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_reading_is_possible(page: Asked, method: str) -> None:
    assert page.send("/api/runs", method=method).status_code == 405


def test_head_is_get_without_a_body(page: Asked) -> None:
    answer = page.send("/api/runs", method="HEAD")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::1", "127.0.0.1@evil"],
)
def test_another_name_for_this_machine_is_refused(page: Asked, host: str) -> None:
    assert page.send("/api/runs", headers={"host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "LOCALHOST", "[::1]:8000"])
def test_names_of_the_loopback_are_accepted_through_any_port(page: Asked, host: str) -> None:
    assert page.send("/api/runs", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/..%2f..%2f..%2fetc%2fpasswd",
        "/%2e%2e/app.py",
        "//etc/passwd",
        "/static/app.js",
        "/app.js/../../app.py",
        "/index.html%00.js",
    ],
)
def test_no_path_leads_out_of_the_files_of_the_page(page: Asked, path: str) -> None:
    assert page.send(path).status_code == 404


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/runs/1/overview", 404),
        ("/api/runs/-1/overview", 404),
        ("/api/runs/x/overview", 404),
        ("/api/runs/²/overview", 404),
        ("/api/runs/" + "9" * 5000 + "/overview", 404),
        ("/api/runs/0/rollouts/0", 404),
        ("/api/runs/0/rollouts/" + "9" * 5000, 404),
        ("/api/runs/0/rollouts/1%20OR%201=1", 404),
        ("/api/runs/0/overview?names=x", 400),
        ("/api/runs/0/rollouts?step=x", 400),
        ("/api/runs/0/rollouts?step=1e3", 400),
        ("/api/runs/0/rollouts?step=" + "9" * 5000, 400),
        ("/api/runs/0/rollouts?reward_min=nan", 400),
        ("/api/runs/0/rollouts?reward_min=1&reward_min=2", 400),
        ("/api/runs/0/rollouts?sort=reward;DROP TABLE rollouts", 400),
        ("/api/runs/0/rollouts?limit=-1", 400),
        ("/api/runs/0/rollouts?unknown=1", 400),
        ("/api/runs/0/timeline?width=0", 400),
        ("/api/runs/0/timeline?width=1000000", 400),
        ("/api/runs/0/timeline?from=inf", 400),
        ("/api/runs/0/metrics?names=" + "a," * 1000, 400),
    ],
)
def test_a_wrong_request_is_an_error_that_says_why(page: Asked, path: str, status: int) -> None:
    answer = page.send(path)
    assert (answer.status_code, len(answer.json()["error"]) > 5) == (status, True)
    assert len(answer.content) < 300


def test_a_key_is_needed_and_given_once_in_the_address_or_as_a_bearer_token(run_dir: Path) -> None:
    with asked(run_dir, key=KEY) as page:
        for path in ("/", "/app.js", "/api/runs", "/api/events"):
            assert page.send(path).status_code == 401
        assert page.send("/api/runs", params={"key": "wrong"}).status_code == 401
        assert page.send("/api/runs", headers={"authorization": f"Bearer {KEY}"}).status_code == 200
        assert page.send("/api/runs", headers={"authorization": b"Bearer \xf6"}).status_code == 401
        answer = page.send("/api/runs/0/metrics", params={"key": KEY, "names": "a b"})
        assert answer.status_code == 303
        assert answer.headers["location"] == "/api/runs/0/metrics?names=a+b"
        (cookie,) = answer.headers.get_list("set-cookie")
        assert KEY not in cookie
        assert "httponly" in cookie.lower()
        assert "samesite=strict" in cookie.lower()
        value = cookie.partition(";")[0]
        assert page.send("/api/runs", headers={"cookie": value}).status_code == 200
        assert page.send("/api/runs", headers={"cookie": f"{value}0"}).status_code == 401


def test_a_key_in_the_address_does_not_lead_to_another_site(run_dir: Path) -> None:
    with asked(run_dir, key=KEY) as page:
        answer = page.send("http://127.0.0.1:8000//evil.example/", params={"key": KEY})
        assert answer.headers["location"] == "/evil.example/"
        answer = page.send("http://127.0.0.1:8000/%E4%B8%AD%25%3F", params={"key": KEY})
        assert answer.headers["location"] == "/%E4%B8%AD%25%3F"


def test_an_address_that_other_machines_reach_needs_a_key(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(PAGE_KEY, raising=False)
    assert main(["view", str(run_dir), "--host", "0.0.0.0"]) == 2
    assert PAGE_KEY in capsys.readouterr().err


@pytest.fixture
def served(run_dir: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "torchtitan_rl.commands.cli", "view", str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.fullmatch(r"page: (http://127\.0\.0\.1:\d+/)\n", process.stdout.readline())
        assert found is not None
        yield found[1], process
        process.kill()


def test_view_serves_until_a_signal_and_writes_nothing(
    served: tuple[str, subprocess.Popen[str]], run_dir: Path
) -> None:
    before = sorted(run_dir.rglob("*"))
    url, process = served
    with urllib.request.urlopen(f"{url}api/events") as events:  # an open stream does not hold it
        assert events.readline() == b"event: change\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 128 + signal.SIGINT
    assert sorted(run_dir.rglob("*")) == before


def test_connections_that_ask_nothing_do_not_keep_others_out(
    served: tuple[str, subprocess.Popen[str]],
) -> None:
    url, _ = served
    port = int(url.rpartition(":")[2].strip("/"))
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        with urllib.request.urlopen(f"{url}api/runs", timeout=10) as answer:
            assert answer.status == 200
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nA: " + b"a" * 20_000)
        assert connection.recv(12) == b"HTTP/1.1 400"


@needs_root
def test_another_user_of_the_machine_cannot_read_it(
    served: tuple[str, subprocess.Popen[str]],
) -> None:
    url, _ = served

    def ask() -> str:
        try:
            with urllib.request.urlopen(f"{url}api/runs", timeout=10) as answer:
                return str(answer.read())
        except OSError as error:
            return type(error).__name__

    assert "sort" not in as_other_user(ask)
    assert as_other_user(ask) in ("RemoteDisconnected", "URLError", "ConnectionResetError")
    with urllib.request.urlopen(f"{url}api/runs") as answer:
        assert answer.status == 200
