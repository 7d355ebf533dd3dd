from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl.launch.addresses import Address, address_errors, mixed_errors

KEYS = Path("keys")


def error_of(text: str, *, keys: Path | None = KEYS, plain: bool = False, field: str = "") -> str:
    errors = address_errors(field or "launch.attach", text, keys=keys, allow_plain_tcp=plain)
    assert len(errors) <= 1
    return errors[0] if errors else ""


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tls://10.0.0.2:26600", "10.0.0.2", 26600),
        ("tls://[fd00::2]:1", "fd00::2", 1),
        ("tcp://127.0.0.3:65535", "127.0.0.3", 65535),
        ("tls://node-3.cluster.local:26600", "node-3.cluster.local", 26600),
        ("tcp://localhost:5", "localhost", 5),
    ],
)
def test_addresses_are_read_and_written_in_the_same_form(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, str(address)) == (host, port, text)


def test_local_is_this_machine() -> None:
    assert Address.parse("local").is_loopback
    assert str(Address.parse("local")) == "local"
    assert error_of("local", keys=None) == ""
    errors = address_errors("--address", "local", keys=None, allow_plain_tcp=False, is_own=True)
    assert errors == ["--address is 'local': give the address to listen on, tls://HOST:PORT"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "10.0.0.2", "10.0.0.2:26600", "http://10.0.0.2:80", "tls:/10.0.0.2:1", "TLS://a:1"),
        *("tls://10.0.0.2", "tls://10.0.0.2:", "tls://10.0.0.2:0", "tls://10.0.0.2:65536"),
        *("tls://10.0.0.2:1/x", "tls://10.0.0.2:+1", "tls://10.0.0.2:1_0", "tls://a:b@c:1"),
        *("tls://:1", "tls://fd00::2:1", "tls://[10.0.0.2]:1", "tls://[fe80::1%eth0]:1"),
        *("tls://[node]:1", "tls://10.0.0.300:1", "tls://a..b:1", "tls://-a:1", "tls://a b:1"),
        *("tcp://0x0:1", "tcp://0X0:1", "tcp://0.0.0.0x:1", "tcp://0x7f.0x1:1", "tcp://0:1"),
        *("tls://a\n:1", "tls://" + "a" * 64 + ":1", " tls://a:1", "*"),
    ],
)
def test_what_is_not_an_address_is_refused_with_the_field(text: str) -> None:
    assert error_of(text, plain=True).startswith(f"launch.attach is {text!r}: ")


@given(st.text(max_size=40) | st.from_regex(r"t(cp|ls)://.{0,20}:[0-9]{0,6}", fullmatch=True))
def test_any_text_is_parsed_or_refused_in_one_line(text: str) -> None:
    message = error_of(text, plain=True)
    assert message.isprintable()
    if not message:
        assert str(Address.parse(str(Address.parse(text)))) == str(Address.parse(text))


@pytest.mark.parametrize("text", ["tls://0.0.0.0:1", "tls://[::]:1", "tls://[::ffff:0.0.0.0]:1"])
def test_all_interfaces_are_refused(text: str) -> None:
    assert "every interface" in error_of(text)


def test_tls_needs_keys_and_the_message_names_the_neighbouring_field() -> None:
    assert error_of("tls://10.0.0.2:1") == ""
    assert "needs launch.keys; make them with `torchtitan-rl keys`" in error_of(
        "tls://10.0.0.2:1", keys=None
    )
    assert "needs --keys;" in error_of("tls://10.0.0.2:1", keys=None, field="--address")


@pytest.mark.parametrize(
    ("hosts", "place"),
    [
        (["127.0.0.1", "127.9.9.9", "localhost", "[::1]"], "on this machine"),
        (["10.0.0.2", "node3", "[fd00::2]", "localhost.example", "8.8.8.8"], "in the network"),
    ],
)
def test_plain_tcp_is_refused_unless_said_by_name(hosts: list[str], place: str) -> None:
    for host in hosts:
        assert f"no one else is {place}, launch.allow_plain_tcp" in error_of(f"tcp://{host}:1")
        assert "--allow-plain-tcp" in error_of(f"tcp://{host}:1", field="--address")
        assert error_of(f"tcp://{host}:1", keys=None, plain=True) == ""


def test_machines_use_one_kind_of_address_and_each_only_once() -> None:
    assert mixed_errors("launch.attach", ["local", "tls://a:1", "tls://b:1", "wrong"]) == []
    assert mixed_errors("launch.attach", ["tls://a:1", "tcp://127.0.0.1:1"]) == [
        "launch.attach has tls:// and tcp:// addresses: give one kind for all machines"
    ]
    assert mixed_errors("launch.attach", ["local", "local"]) == [
        "launch.attach has local more than once: give each once"
    ]
