"""The addresses of this machine, free ports, and what listens elsewhere."""

from __future__ import annotations

import socket

import pytest

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch import interfaces
from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.launch.interfaces import (
    accepts,
    close_connections,
    first_ephemeral_port,
    free_port,
    listening_host,
    why_not_listen,
)


@pytest.mark.parametrize(
    ("interface", "host"),
    [("lo", "127.0.0.1"), ("127.0.0.7", "127.0.0.7"), ("localhost", "localhost")],
)
def test_it_can_be_named(interface, host) -> None:
    assert listening_host(interface, "no.such.host.invalid") == host


def test_what_is_not_of_this_node_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"launch.interface is '192\.0\.2\.1': this node has no"):
        listening_host("192.0.2.1", "127.0.0.1")
    with pytest.raises(ConfigError, match=r"no way to no\.such\.host\.invalid"):
        listening_host("", "no.such.host.invalid")


def test_a_free_port_can_be_listened_at_and_a_taken_one_accepts_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(scheme="tcp", host="127.0.0.1", port=server.getsockname()[1])
        assert why_not_listen(address) == "Address already in use"
        assert accepts(str(address))
    assert why_not_listen(address) == ""
    assert not accepts(str(address))


def test_the_system_gives_a_free_port_to_no_one_else() -> None:
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1
    assert max(ports) < first_ephemeral_port()


def test_what_another_process_holds_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        monkeypatch.setattr(interfaces, "_LOWEST", port)
        monkeypatch.setattr(interfaces, "first_ephemeral_port", lambda: port + 2)
        assert free_port() == port + 1


def test_connections_to_an_address_are_closed_and_others_stay() -> None:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    with servers[0] as server, servers[1] as other:
        lost = socket.create_connection(server.getsockname())
        kept = socket.create_connection(other.getsockname())
        close_connections(Address.parse(f"tcp://127.0.0.1:{server.getsockname()[1]}"))
        assert lost.recv(1) == b""
        kept.sendall(b"x")
        assert other.accept()[0].recv(1) == b"x"
