"""What counts as a server that is not there yet."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest

from torchtitan_rl.environments.open_env import _is_away

pytest.importorskip("websockets")


def test_a_host_with_several_addresses_is_away_where_none_listens() -> None:
    async def connect(host: str | None, port: int) -> None:
        await asyncio.get_running_loop().create_connection(asyncio.Protocol, host, port)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for host in ("127.0.0.1", None):  # None: all loopback addresses
        with pytest.raises(OSError, match="Connect call failed") as refused:
            asyncio.run(connect(host, port))
        assert _is_away(refused.value)


@pytest.mark.parametrize("error", [socket.gaierror(), ssl.SSLError(), TimeoutError(), ValueError()])
def test_what_will_not_go_away_is_not_waited_for(error: Exception) -> None:
    assert not _is_away(error)


@pytest.mark.parametrize(("status", "is_away"), [(503, True), (403, False)])
def test_a_proxy_without_a_server_is_waited_for(status: int, is_away: bool) -> None:
    from websockets.datastructures import Headers
    from websockets.exceptions import InvalidStatus
    from websockets.http11 import Response

    assert _is_away(InvalidStatus(Response(status, "", Headers()))) == is_away
