"""``torchtitan-rl retriever``: what it finds, whom it serves, and what it refuses."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.other_user import as_other_user, needs_root, reach
from tests.support.retrievers import start_retriever
from torchtitan_rl.commands.retriever import Corpus, main
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.serving.config import API_KEY, Keys

pytest.importorskip("bm25s")
PLAYS = ["Faust is a play by Goethe.", "Hamlet is a play by Shakespeare.", "", "Play the play."]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return start_retriever(tmp_path_factory.mktemp("plays"), PLAYS)


def ask(url: str, body: Any, **options: Any) -> httpx.Response:
    content = body if isinstance(body, (bytes, str)) else json.dumps(body)
    return httpx.post(url, content=content, timeout=60, **options)


def test_a_request_of_search_r1_is_answered_in_its_form(url: str) -> None:
    asked = {"queries": ["Who wrote Faust?", "a play", "and the of"], "topk": 2}
    faust = {"id": "0", "contents": PLAYS[0]}
    plain = ask(url, asked).json()["result"]
    assert plain[0] == [faust]
    assert [one["id"] for one in plain[1]] == ["3", "0"]  # the first of equally good ones
    assert plain[2] == []
    scored = ask(url, {**asked, "return_scores": True}).json()["result"]
    assert [[one["document"] for one in found] for found in scored] == plain
    assert scored[1][0]["score"] > scored[1][1]["score"] > 0
    assert len(ask(url, {"queries": ["play"]}).json()["result"][0]) == 3  # --topk


REFUSED = [
    (b"", 400),
    (b"[]", 400),
    (b'{"queries": "play"}', 400),
    (b'{"queries": ["\xff"]}', 400),
    (b'{"queries": ["\\ud800"]}', 400),
    (b'{"queries": ["play"], "x": ' + b"[" * 100_000, 400),
    ({"queries": ["play"], "topk": 0}, 400),
    ({"queries": ["play"], "topk": 10**30}, 400),
    ({"queries": ["play"] * 5000}, 400),
    ({"queries": ["play"] * 1000, "topk": 100}, 400),
    (b" " * (5 << 20), 413),
]


@pytest.mark.parametrize(("body", "status"), REFUSED)
def test_what_is_no_request_is_refused(url: str, body: Any, status: int) -> None:
    answer = ask(url, body)
    assert answer.status_code == status
    assert "Traceback" not in answer.text
    assert answer.json()["error"]["message"]


def test_other_routes_do_not_exist(url: str) -> None:
    assert httpx.get(url).status_code == 404
    assert ask(url + "/../other", {"queries": []}).status_code == 404
    assert httpx.get(url.replace("retrieve", "health")).json() == {"documents": 4}


def test_a_query_as_long_as_a_body_is_soon_answered(url: str) -> None:
    words = " ".join(f"play{number}" for number in range(300_000))
    started = time.monotonic()
    (found,) = ask(url, {"queries": [f"faust {words}"]}).json()["result"]
    assert found[0]["id"] == "0"
    assert time.monotonic() - started < 20


def test_clients_that_never_send_their_body_take_no_place(url: str) -> None:
    port = int(url.rsplit(":", 1)[1].partition("/")[0])
    head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
    waiting = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
    for client in waiting:
        client.sendall(head)
    assert ask(url, {"queries": ["faust"]}).status_code == 200
    for client in waiting:
        client.close()


def test_with_a_key_only_its_holders_are_served(tmp_path: Path) -> None:
    url = start_retriever(tmp_path, PLAYS, Keys(api="secret"))
    asked = {"queries": ["faust"]}
    assert ask(url, asked).status_code == 401
    assert ask(url, asked, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert ask(url, asked, headers={"Authorization": "Bearer secret"}).status_code == 200


@needs_root
def test_other_users_neither_read_nor_load_it_without_a_key(url: str) -> None:
    port = int(url.rsplit(":", 1)[1].partition("/")[0])
    body = json.dumps({"queries": ["play"] * 4000, "topk": 4}).encode()
    head = b"POST /retrieve HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    health = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    attacks = (health, head + body, head + body[:9], head[:-2])

    def attack() -> str:
        address = ("127.0.0.1", port)
        return " ".join(reach(socket.AF_INET, address, one) for one in attacks for _ in range(5))

    assert set(as_other_user(attack).split()) == {"closed"}
    assert ask(url, {"queries": ["faust"]}).status_code == 200


def test_without_a_key_it_listens_on_this_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_KEY, raising=False)
    with pytest.raises(ConfigError, match=f"--host is 0.0.0.0: .* set {API_KEY}"):
        main(["--corpus", "no.jsonl", "--host", "0.0.0.0"])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (None, r"there is no such file"),
        ("", r"--corpus has no words"),
        ('{"contents": "of the"}\n', r"--corpus has no words"),
        ('{"id": "1"}\n', r"--corpus: .*corpus.jsonl, line 1: no column 'contents'; it has id"),
        ("no JSON\n", r"--corpus: .*corpus.jsonl, line 1: not JSON"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_refused(
    tmp_path: Path, text: str | None, error: str
) -> None:
    if text is not None:
        (tmp_path / "corpus.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=error):
        main(["--corpus", str(tmp_path / "corpus.jsonl"), "--port", "0"])


def test_an_index_is_written_once_and_belongs_to_its_corpus(tmp_path: Path) -> None:
    file, folder = tmp_path / "corpus.jsonl", tmp_path / "index"
    file.write_text('{"contents": "red wine"}\n{"contents": "red bread"}\n')
    made = Corpus([str(file)], folder).find("red wine", 2)
    before = {one.name: one.stat().st_mtime_ns for one in folder.iterdir()}
    assert Corpus([str(file)], folder).find("red wine", 2) == made
    assert [row["contents"] for row, _ in made] == ["red wine", "red bread"]
    assert {one.name: one.stat().st_mtime_ns for one in folder.iterdir()} == before
    file.write_text('{"contents": "white wine"}\n')
    with pytest.raises(ConfigError, match=r"--index is .*it was made of corpus\.jsonl"):
        Corpus([str(file)], folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="it is no index"):
        Corpus([str(file)], tmp_path / "empty")
    (folder / "corpus.json").write_text("[1]")
    with pytest.raises(ConfigError, match="it is no index"):
        Corpus([str(file)], folder)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["corpus.jsonl", "empty", "index"]


def test_many_clients_at_once_get_their_own_answers(url: str) -> None:
    found: dict[int, Any] = {}

    def search(number: int) -> None:
        query = "faust" if number % 2 else "hamlet"
        found[number] = ask(url, {"queries": [query]}).json()["result"][0][0]["id"]

    threads = [threading.Thread(target=search, args=(number,)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: "0" if number % 2 else "1" for number in range(40)}
