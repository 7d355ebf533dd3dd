"""Clients that would take the endpoint's memory, descriptors or places, on the real HTTP server
with the endpoint's layers, in a process of its own."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psutil
import pytest

from tests.support.http_attacks import ATTACKS, BODY, CHUNKED, HEALTH, KEY, POST, Target, chat

MIB = 1 << 20
GET = HEALTH.removesuffix(b"\r\n")


@contextmanager
def server(*, max_files: int, **limits: Any) -> Iterator[Target]:
    """256 of its descriptors are for other things than connections."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.attacked_server", json.dumps(limits)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files)),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield Target(int(process.stdout.readline()), psutil.Process(process.pid))
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


@pytest.fixture(scope="module")
def attacked() -> Iterator[Target]:
    with server(max_files=500, max_connections=10_000) as target:
        yield target


@pytest.fixture(scope="module")
def impatient() -> Iterator[Target]:
    short = dict.fromkeys(("head_s", "body_s", "read_s"), 0.3)
    with server(max_files=500, max_connections=100, **short) as target:
        yield target


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attacked_endpoint_serves_within_its_memory_and_descriptors(
    attacked: Target, attack: str
) -> None:
    attacked.require_to_hold(attack, more_bytes=100 * MIB)


def test_unfinished_bodies_of_clients_with_the_key_are_bounded(attacked: Target) -> None:
    with attacked.under(200, POST + KEY + BODY):
        assert attacked.status(HEALTH) == 200
        assert attacked.process.memory_info().rss < 300 * MIB  # 64 MiB are held
    attacked.require_service()


def test_when_clients_with_the_key_keep_all_places_others_are_refused_and_health_answers() -> None:
    with server(max_files=500, max_connections=40) as target:
        with target.under(100, chat(max_tokens=1, seed=600)):
            assert target.status(HEALTH) == 200
            assert target.status(chat(max_tokens=1)) == 429
        while target.status(chat(max_tokens=1)) == 429:  # until those requests have ended
            time.sleep(0.05)
        target.require_service()


def test_more_than_a_thousand_clients_at_once_are_all_answered() -> None:
    with server(max_files=4000, max_connections=4000) as target:
        clients = [target.connect() for _ in range(1200)]
        for client in clients:
            client.sendall(chat(max_tokens=1))
        for client in clients:
            with closing(client):
                assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


LATE = {
    "a head": (POST, b""),
    "a body": (POST + KEY + b"Content-Length: 9\r\n\r\n{", b""),
    "a refused body": (POST + b"Content-Length: 9\r\n\r\n{", b"HTTP/1.1 401 "),
    "anything": (b"", b""),
    "more than empty lines": (b"\r\n\r\n", b""),
}


@pytest.mark.parametrize("what", LATE)
def test_what_does_not_arrive_in_time_ends_the_connection(impatient: Target, what: str) -> None:
    sent, answer = LATE[what]
    assert impatient.ask(sent)[:13] == answer


def test_empty_lines_after_an_answer_do_not_keep_a_connection(impatient: Target) -> None:
    with closing(impatient.connect()) as client:
        client.sendall(HEALTH)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"\r\n")
        assert client.recv(1 << 16) == b""


def test_an_answer_that_its_client_does_not_read_is_dropped(impatient: Target) -> None:
    memory, num_files = impatient.process.memory_info().rss, impatient.process.num_fds()
    with closing(impatient.connect()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(chat(max_tokens=100 * MIB))
        assert client.recv(1) == b"H"
        impatient.wait_until_descriptors(num_files)
        assert impatient.process.memory_info().rss < memory + 50 * MIB


MALFORMED = {
    "too many headers": GET + b"A: b\r\n" * 101 + b"\r\n",
    "a large header": GET + b"A: " + b"b" * 17_000 + b"\r\n\r\n",
    "a long URL": b"GET /health?" + b"a" * 17_000 + b" HTTP/1.1\r\n\r\n",
    "two framings": CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n0\r\n\r\n"),
    "a chunk without its size": CHUNKED + b"x\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00",
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_request_is_one_400_and_the_end(attacked: Target, what: str) -> None:
    answer = attacked.ask(MALFORMED[what])
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1") == 1


UNUSUAL = {
    "HTTP/1.0": HEALTH.replace(b"1.1", b"1.0"),
    "empty lines before": b"\r\n\r\n" + HEALTH,
    "an absolute URL": HEALTH.replace(b"/health", b"http://other/health"),
    "a web socket": GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "an expectation": chat(max_tokens=1).replace(b"\r\n", b"\r\nExpect: 100-continue\r\n", 1),
    "trailers": CHUNKED.replace(b"\r\n", b"\r\n" + KEY, 1)
    + b'11\r\n{"max_tokens": 1}\r\n0\r\nX-Session-ID: a b\r\n\r\n',
}


@pytest.mark.parametrize("what", UNUSUAL)
def test_an_unusual_request_is_answered(attacked: Target, what: str) -> None:
    with closing(attacked.connect()) as client:
        client.sendall(UNUSUAL[what])
        answer = client.recv(1 << 16)
        if answer == b"HTTP/1.1 100 Continue\r\n\r\n":
            answer = client.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200 ") or b"\r\n\r\nHTTP/1.1 200 " in answer
