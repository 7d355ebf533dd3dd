"""The simplest ways to move bytes on this machine, for comparison with weight syncs.

Both copy into memory that is in use already, so no page is touched for the first time.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import torch

_DONE = b"!"


class MemoryCopy:
    """A copy between two buffers of this process, by ``Tensor.copy_``."""

    def __init__(self, num_bytes: int, *, threads: int) -> None:
        self._source = torch.ones(num_bytes, dtype=torch.uint8)
        self._target = torch.zeros(num_bytes, dtype=torch.uint8)
        self._threads = threads

    def run(self) -> float:
        """Seconds."""
        held = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            started = time.perf_counter()
            self._target.copy_(self._source)
            return time.perf_counter() - started
        finally:
            torch.set_num_threads(held)


class TcpCopy:
    """A copy of the same bytes to several reading processes at once, each over its own loopback
    connection.

    The connections stay open as long as this object, so that their windows have grown before a
    measurement.
    """

    def __init__(self, num_bytes: int, *, readers: int) -> None:
        self._image = bytearray(num_bytes)
        self._threads = ThreadPoolExecutor(readers)
        context = multiprocessing.get_context("spawn")
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._processes = [
                context.Process(target=_read, args=(server.getsockname(), num_bytes), daemon=True)
                for _ in range(readers)
            ]
            for process in self._processes:
                process.start()
            self._connections = [server.accept()[0] for _ in range(readers)]

    def run(self) -> float:
        """Copy once. Returns the seconds until every reader has all bytes."""
        started = time.perf_counter()
        list(self._threads.map(self._send, self._connections))
        return time.perf_counter() - started

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10.0)
            process.kill()
        self._threads.shutdown()

    def _send(self, connection: socket.socket) -> None:
        connection.sendall(self._image)
        if connection.recv(len(_DONE)) != _DONE:
            raise RuntimeError("a reader ended before it had everything")


def _read(address: tuple[str, int], num_bytes: int) -> None:
    """Fill the same memory again and again, until the sender closes the connection."""
    image = memoryview(bytearray(num_bytes))
    with socket.create_connection(address) as connection:
        while True:
            filled = 0
            while filled < num_bytes:
                count = connection.recv_into(image[filled:])
                if count == 0:
                    return
                filled += count
            connection.sendall(_DONE)
