"""References to published weights, and their distribution to hosts.

The first replica of a host that needs a version starts the fetch; the others wait for it. At most
``fan_out`` hosts read from one source at the same time. A host that has a whole version is a source
for other hosts, so many hosts fetch in a tree whose root is the trainer.

Invariants
- A host fetches a version at most once, unless the fetch failed.
- A host that cannot read from another host, or loses its source, reads from the trainer.
- Every wait for a source ends, because every fetch ends. If a replica stops waiting, the fetch
  continues for the others.
- While the trainer is being started again, nothing is read; afterwards each version is read from
  where the new trainer has published it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan_rl.errors import DeadlineError, ReplicaError, WeightSyncError

if TYPE_CHECKING:
    from torchtitan_rl.weights.image import ImageLayout, PackedPart

logger = logging.getLogger(__name__)

_NOTICE_S = 1.0  # within which a dead trainer is noticed

_FAILURES = (WeightSyncError, ReplicaError, DeadlineError)
_TRAINER = None  # as a source; hosts are numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemoryHandle:
    """A safetensors file with Hugging Face names, memory-mapped by processes of the same host."""

    version: int
    path: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSource:
    """The packed parts of a version in the memory of one process (see `weights/remote.py`)."""

    owner: str  # the process's name in errors: "trainer rank 1", "host 2"
    parts: tuple[PackedPart, ...]
    buffers: tuple[Any, ...]  # monarch.rdma.RDMABuffer, over slices of the packed bytes, in order
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMemoryHandle:
    """The parts of a version in the memory of the trainer's ranks.

    ``keep``: versions that are still needed, besides this version and the previous one. ``shared``:
    the same version in shared memory, if there are replicas on the trainer's host.
    """

    layout: ImageLayout
    sources: tuple[RemoteSource, ...]
    keep: frozenset[int] = frozenset()
    shared: SharedMemoryHandle | None = None

    @property
    def version(self) -> int:
        return self.layout.version

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """A version in a host's shared memory, with the number of bytes read from other hosts."""

    handle: SharedMemoryHandle
    num_bytes: int
    seconds: float


WeightHandle = SharedMemoryHandle | RemoteMemoryHandle


def versions_to_free(held: list[int], keep: frozenset[int]) -> list[int]:
    """Return which of the versions ``held`` (oldest first) to release before another version is
    published.

    >>> versions_to_free([3, 4, 5], keep=frozenset({3}))
    [4]
    """
    return [version for version in held[:-1] if version not in keep]


class SourceLostError(WeightSyncError):
    """The trainer that published a version is lost. Once ``renewed`` is set, the version can be
    read by the same handle again."""

    def __init__(self, version: int, renewed: asyncio.Event) -> None:
        super().__init__(f"version {version}: the trainer is lost")
        self.renewed = renewed


class HostFetcher(Protocol):
    """Fetches weights for one host. Both methods raise WeightSyncError, ReplicaError or
    DeadlineError."""

    async def fetch(self, handle: RemoteMemoryHandle, parent: RemoteSource | None, /) -> Fetched:
        """See `WeightReceiver.fetch`. Calls for different versions may overlap. A cancelled call
        does not delay later calls."""

    async def offer(self, version: int, /) -> RemoteSource: ...


class WeightDistribution:
    """Fetches weights for all replicas of a run.

    Args:
        fetchers: the fetchers by host. Replicas on other hosts use the trainer's shared memory.
        fan_out: number of hosts that read from one source at the same time; 0: all read from the
            trainer.
    """

    def __init__(self, fetchers: Mapping[int, HostFetcher], *, fan_out: int) -> None:
        self._fetchers = dict(fetchers)
        self._fan_out = fan_out
        self._fetches: dict[tuple[int, int], asyncio.Task[Fetched]] = {}  # by host and version
        self._readers: dict[int, dict[int | None, int]] = {}  # count, by version and source
        self._reads: dict[int, set[asyncio.Timeout]] = {}  # by the source host
        self._changed = asyncio.Event()  # set, and replaced, when `_readers` changes
        self._ended: list[Fetched] = []
        self._source_lost = asyncio.Event()
        self._source_renewed = asyncio.Event()
        self._on_wanted: Callable[[], None] | None = None
        self._handles: dict[int, WeightHandle] = {}  # of a trainer that was started again

    def lose_source(self, *, on_wanted: Callable[[], None] | None = None) -> None:
        """The trainer is lost. `read` raises SourceLostError until `renew_source`, and calls
        ``on_wanted``."""
        self._on_wanted = on_wanted
        self._source_lost.set()

    def renew_source(self, handles: Mapping[int, WeightHandle]) -> None:
        """Another trainer has published the versions, which replace those of the same number."""
        self._handles = dict(handles)
        self._source_lost.clear()
        self._source_renewed.set()
        self._source_renewed = asyncio.Event()

    async def read(
        self,
        handle: WeightHandle,
        host: int,
        read: Callable[[SharedMemoryHandle], Awaitable[None]],
    ) -> None:
        """Call ``read`` with a version in the shared memory of ``host``.

        Raises:
            SourceLostError: the trainer is lost.
            WeightSyncError, ReplicaError, DeadlineError: see `ensure_on_host`, or ``read`` failed.
        """
        renewed = self._source_renewed
        if self._source_lost.is_set():
            raise self._want(handle.version, renewed)
        handle = self._handles.get(handle.version, handle)
        try:
            await read(await self.ensure_on_host(handle, host))
        except WeightSyncError as error:
            # The version may be gone before the death of its trainer is noticed.
            with suppress(TimeoutError):
                async with asyncio.timeout(_NOTICE_S):
                    await self._source_lost.wait()
            if self._source_lost.is_set() or renewed.is_set():
                raise self._want(handle.version, renewed) from error
            raise

    def _want(self, version: int, renewed: asyncio.Event) -> SourceLostError:
        if self._on_wanted is not None and not renewed.is_set():
            self._on_wanted()
        return SourceLostError(version, renewed)

    async def ensure_on_host(self, handle: WeightHandle, host: int) -> SharedMemoryHandle:
        """Return a version in the shared memory of ``host``, after fetching it if necessary. Raises
        WeightSyncError, ReplicaError, DeadlineError: the host could not fetch the version."""
        if isinstance(handle, SharedMemoryHandle):
            return handle
        if host not in self._fetchers:
            if handle.shared is None:
                raise WeightSyncError(f"version {handle.version}: nothing fetches for host {host}")
            return handle.shared
        fetch = self._fetches.get((host, handle.version)) or self._start(host, handle)
        await asyncio.wait((fetch,))  # a cancelled replica does not cancel the fetch
        if fetch.cancelled():
            raise WeightSyncError(f"version {handle.version}: the fetch for host {host} was ended")
        return fetch.result().handle

    def replace(self, host: int, fetcher: HostFetcher) -> None:
        """Forget the versions of a lost host. Hosts that are reading from it read from the trainer
        instead."""
        for key in [key for key in self._fetches if key[0] == host]:
            self._fetches.pop(key).cancel()
        for read in self._reads.pop(host, ()):
            read.reschedule(asyncio.get_running_loop().time())  # the read might otherwise end later
        for readers in self._readers.values():
            readers.pop(host, None)
        self._fetchers[host] = fetcher

    def take_fetches(self) -> tuple[Fetched, ...]:
        """Return the fetches of all hosts that ended since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    async def close(self) -> None:
        """End all fetches. Waiting replicas get an error."""
        fetches = list(self._fetches.values())
        for fetch in fetches:
            fetch.cancel()
        if fetches:
            await asyncio.wait(fetches)

    def _start(self, host: int, handle: RemoteMemoryHandle) -> asyncio.Task[Fetched]:
        self._forget_released(host, handle)
        fetch = asyncio.create_task(
            self._fetch(host, handle), name=f"version {handle.version} for host {host}"
        )
        self._fetches[host, handle.version] = fetch
        fetch.add_done_callback(lambda fetch: self._on_end(host, handle.version, fetch))
        return fetch

    def _on_end(self, host: int, version: int, fetch: asyncio.Task[Fetched]) -> None:
        if not fetch.cancelled() and fetch.exception() is None:
            self._ended.append(fetch.result())
        elif self._fetches.get((host, version)) is fetch:
            del self._fetches[host, version]  # the next request tries again

    async def _fetch(self, host: int, handle: RemoteMemoryHandle) -> Fetched:
        fetcher = self._fetchers[host]
        if self._fan_out == 0:
            fetched = await fetcher.fetch(handle, None)
        else:
            source = await self._take(handle.version)
            try:
                fetched = await self._fetch_from(source, fetcher, handle)
            finally:
                self._give_back(handle.version, source)
        if self._fetchers[host] is fetcher:
            self._readers.setdefault(handle.version, {})[host] = 0
            self._notify()
        return fetched

    async def _fetch_from(
        self, source: int | None, fetcher: HostFetcher, handle: RemoteMemoryHandle
    ) -> Fetched:
        if source is not None:
            try:
                return await self._read(source, fetcher, handle)
            except _FAILURES as error:
                logger.warning(
                    "version %s: read from the trainer, not from a host: %s", handle.version, error
                )
                self._readers.get(handle.version, {}).pop(source, None)  # the version may be gone
        return await fetcher.fetch(handle, None)

    async def _read(self, source: int, fetcher: HostFetcher, handle: RemoteMemoryHandle) -> Fetched:
        reads = self._reads.setdefault(source, set())
        try:
            async with asyncio.timeout(None) as read:
                reads.add(read)
                try:
                    parent = await self._fetchers[source].offer(handle.version)
                    return await fetcher.fetch(handle, parent)
                finally:
                    reads.discard(read)
        except TimeoutError as error:
            raise WeightSyncError(f"version {handle.version}: host {source} is lost") from error

    async def _take(self, version: int) -> int | None:
        """Wait for a free source, and take the one with the fewest readers. Hosts are preferred to
        the trainer, which has other work."""
        while True:
            readers = self._readers.setdefault(version, {})
            readers.setdefault(_TRAINER, 0)
            source = min(readers, key=lambda source: (readers[source], source is _TRAINER))
            if readers[source] < self._fan_out:
                readers[source] += 1
                return source
            await self._changed.wait()

    def _give_back(self, version: int, source: int | None) -> None:
        readers = self._readers.get(version, {})
        if source in readers:
            readers[source] = max(0, readers[source] - 1)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _forget_released(self, host: int, handle: RemoteMemoryHandle) -> None:
        held = [v for at, v in self._fetches if at == host and self._fetches[at, v].done()]
        for version in versions_to_free(held, handle.keep):
            del self._fetches[host, version]
        for version in versions_to_free(sorted(self._readers), handle.keep):
            if not any(self._readers[version].values()):
                del self._readers[version]
