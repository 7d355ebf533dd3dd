"""Whether a process could listen at an address."""

from __future__ import annotations

import socket

from torchtitan_rl.launch.addresses import Address
from torchtitan_rl.launch.listening import why_not_listen


def test_a_free_port_of_this_machine_can_be_listened_at_and_a_taken_one_cannot() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address(scheme="tcp", host="127.0.0.1", port=server.getsockname()[1])
        assert why_not_listen(address) == "Address already in use"
    assert why_not_listen(address) == ""


def test_an_address_of_another_machine_cannot_be_listened_at() -> None:
    far = Address(scheme="tls", host="192.0.2.1", port=26600)
    assert why_not_listen(far) == "Cannot assign requested address"
    assert why_not_listen(Address(scheme="tls", host="no.such.invalid", port=1))
