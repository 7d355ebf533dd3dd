"""The store that the launcher of rank 0 provides where no torchrun does."""

from __future__ import annotations

import socket

import pytest

from torchtitan_rl.commands.launcher import connect
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.meeting import Node


def free_port(host: str, family: socket.AddressFamily) -> int:
    with socket.create_server((host, 0), family=family) as server:
        return int(server.getsockname()[1])


def meet(host: str, port: int) -> bytes:
    """What another launcher reads in the store of rank 0."""
    first = Node(num_nodes=2, store_host=host, store_port=port, provides_store=True)
    store = connect(first)
    store.set("key", "value")
    second = Node(rank=1, num_nodes=2, store_host=host, store_port=port)
    return bytes(connect(second).get("key"))


def test_launchers_meet_in_the_store_of_rank_0() -> None:
    assert meet("127.0.0.1", free_port("127.0.0.1", socket.AF_INET)) == b"value"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_the_store_may_have_an_ipv6_address() -> None:
    assert meet("::1", free_port("::1", socket.AF_INET6)) == b"value"


@pytest.mark.parametrize(
    ("host", "cause"),
    [
        ("192.0.2.1", "Cannot assign"),  # of another machine
        ("a" * 64, "label"),
        ("0.0.0.0", "every interface"),
        ("0x0", "every interface"),
        ("::", "every interface"),
    ],
)
def test_an_address_that_rank_0_cannot_have_is_refused_with_the_cause(
    host: str, cause: str
) -> None:
    node = Node(num_nodes=2, store_host=host, store_port=29500, provides_store=True)
    with pytest.raises(ConfigError, match=f"MASTER_ADDR is '{host}' and .*{cause}.*; give an"):
        connect(node)


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        node = Node(num_nodes=2, store_host="127.0.0.1", store_port=port, provides_store=True)
        with pytest.raises(ConfigError, match="in use"):
            connect(node)
