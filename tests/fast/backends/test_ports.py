"""Ports that processes bind later."""

from __future__ import annotations

import socket

from torchtitan_rl.backends.monarch.ports import first_ephemeral_port, free_port


def test_a_port_is_none_that_the_system_gives_out_meanwhile():
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 1
    assert max(ports) < first_ephemeral_port()
    for port in ports:
        with socket.socket() as own:
            own.bind(("127.0.0.1", port))


def test_what_another_process_holds_is_not_chosen(monkeypatch):
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        monkeypatch.setattr("torchtitan_rl.backends.monarch.ports._LOWEST", port)
        monkeypatch.setattr(
            "torchtitan_rl.backends.monarch.ports.first_ephemeral_port", lambda: port + 2
        )
        assert free_port() == port + 1
