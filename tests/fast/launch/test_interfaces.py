"""The address that a node listens on."""

from __future__ import annotations

import pytest

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.interfaces import listening_host


def test_it_is_where_the_way_to_the_others_begins() -> None:
    assert listening_host("", "127.0.0.1") == "127.0.0.1"


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
