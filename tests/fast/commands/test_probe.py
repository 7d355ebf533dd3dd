"""Against real servers, of Python's `ssl`; `tests/real/test_tls_workers.py` tries Monarch's."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from torchtitan_rl.commands.attaching import probe_errors, why_not_attach
from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.launch.keys import create, make_authority, make_host

Serve = Callable[[socket.socket], None]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "one"
    create(folder, ["127.0.0.1", "127.0.0.2"], days=30)
    return folder


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "other"
    create(folder, ["127.0.0.1"], days=30)
    return folder


@contextlib.contextmanager
def serving(serve: Serve) -> Iterator[int]:
    """Handles connections one after another; yields the port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def loop() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                serve(connection)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def tls(folder: Path, *, most: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3, tickets: int = 2) -> Serve:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.load_verify_locations(folder / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.maximum_version = most
    context.num_tickets = tickets

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as stream:
            stream.recv(1)

    return serve


def cause_at(port: int, keys: Path | None, scheme: str = "tls") -> str:
    return why_not_attach(Address.parse(f"{scheme}://127.0.0.1:{port}"), keys, timeout_s=1.0)


@pytest.mark.parametrize(
    ("most", "tickets"), [(ssl.TLSVersion.TLSv1_2, 0), (ssl.TLSVersion.TLSv1_3, 2)]
)
def test_a_worker_with_keys_of_the_same_authority_is_accepted(
    keys: Path, most: ssl.TLSVersion, tickets: int
) -> None:
    with serving(tls(keys / "127.0.0.1", most=most, tickets=tickets)) as port:
        assert cause_at(port, keys / "127.0.0.2") == ""


@pytest.mark.parametrize("most", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_worker_that_refuses_our_certificate_is_told_from_one_that_accepts_it(
    keys: Path, other_keys: Path, tmp_path: Path, most: ssl.TLSVersion
) -> None:
    mixed = tmp_path / "mixed"  # trusts the worker, and is not trusted by it
    mixed.mkdir()
    for name, folder in {"ca": keys, "cert": other_keys, "key": other_keys}.items():
        content = (folder / "127.0.0.1" / f"{name}.pem").read_bytes()
        (mixed / f"{name}.pem").write_bytes(content)
    with serving(tls(keys / "127.0.0.1", most=most)) as port:
        assert "the worker refuses this host's certificate" in cause_at(port, mixed)


def test_a_worker_of_another_authority_is_named_as_such(keys: Path, other_keys: Path) -> None:
    with serving(tls(other_keys / "127.0.0.1")) as port:
        assert "certificate is of another authority" in cause_at(port, keys / "127.0.0.1")


def test_a_certificate_for_another_machine_names_the_option_that_adds_one(keys: Path) -> None:
    with serving(tls(keys / "127.0.0.2")) as port:
        text = cause_at(port, keys / "127.0.0.1")
        assert "is not for 127.0.0.1; make keys for it with `torchtitan-rl keys --add" in text


@pytest.mark.parametrize(("age", "says"), [(40, "has expired"), (-5, "compare the clocks")])
def test_a_certificate_out_of_its_time_is_named(tmp_path: Path, age: int, says: str) -> None:
    now = datetime.now(UTC)
    authority = make_authority(now=now - timedelta(days=50), days=100)
    host = make_host(authority, ["127.0.0.1"], now=now - timedelta(days=age), days=30)
    (tmp_path / "ca.pem").write_bytes(authority.certificate_pem)
    (tmp_path / "cert.pem").write_bytes(host.certificate_pem)
    (tmp_path / "key.pem").write_bytes(host.key_pem)
    with serving(tls(tmp_path)) as port:
        assert says in cause_at(port, tmp_path)


def hang_up(connection: socket.socket) -> None:
    connection.recv(1)


def speak_http(connection: socket.socket) -> None:
    connection.recv(1 << 14)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def say_nothing(connection: socket.socket) -> None:
    while connection.recv(1 << 14):
        pass


@pytest.mark.parametrize(
    ("serve", "says"),
    [
        (hang_up, "is it a tcp:// worker?"),
        (speak_http, "does not speak TLS"),
        (say_nothing, "does not answer; is the worker stopped?"),
    ],
)
def test_what_does_not_speak_tls_is_named(keys: Path, serve: Serve, says: str) -> None:
    with serving(serve) as port:
        assert says in cause_at(port, keys / "127.0.0.1")


def test_a_plain_worker_is_accepted_at_a_plain_address(keys: Path) -> None:
    with serving(hang_up) as port:
        assert cause_at(port, None, "tcp") == ""
    with serving(speak_http) as port:
        assert cause_at(port, None, "tcp") == "what listens there is not a worker"
    with serving(tls(keys / "127.0.0.1")) as port:
        assert (
            cause_at(port, None, "tcp") == f"it speaks TLS; give tls://127.0.0.1:{port}, and keys"
        )


def test_what_does_not_listen_is_tried_again_and_then_named() -> None:
    with serving(hang_up) as port:
        pass
    dead = Address.parse(f"tcp://127.0.0.1:{port}")
    (error,) = probe_errors("launch.attach", [Address.parse("local"), dead], None)
    assert error.startswith(f"launch.attach is '{dead}': nothing listens there; start ")
    with socket.socket() as late:
        late.bind(("127.0.0.1", port))
        threading.Timer(0.3, late.listen).start()
        assert probe_errors("launch.attach", [dead], None, wait_s=30) == []
