"""Runs an endpoint in the controller: its bridge, the system's status, the administrators' commands
and a clean shutdown.

Reading the status never waits: engines are polled in the background, and the status contains their
last answers.

Invariant: after the ``async with`` block no client's request runs.

`WeightLoader` loads a checkpoint from a directory into the replicas of a stand-alone server, while
it serves: the weights are published as a new policy version, just as a trainer publishes weights.
Invariants: one checkpoint is loaded at a time. One that does not fit the served model is refused
before any replica sees it. Exactly the checked tensors are published: files are first read into
memory, so that rewriting a file during the load has no effect.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.aio import cancel_all, retrieve
from torchtitan_rl.errors import (
    EndpointLostError,
    GenerationError,
    TorchtitanRLError,
    WeightSyncError,
)
from torchtitan_rl.generation.commands import PauseMode
from torchtitan_rl.rope_fields import with_flat_rope
from torchtitan_rl.routing.replicas import Phase
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.routing.weights import SyncMode, SyncReport
from torchtitan_rl.serving.bridge import BridgeCounts, EndpointBridge
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import (
    GAUGE_PREFIX,
    CommandName,
    Handler,
    SystemStatus,
    handler,
)
from torchtitan_rl.serving.restarts import Endpoint, EndpointRestarts
from torchtitan_rl.serving.sessions import Sessions
from torchtitan_rl.types import EngineStats

if TYPE_CHECKING:
    import torch

    from torchtitan_rl.weights.shm import SharedMemoryPublisher

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 30.0  # a dead process is noticed after ten seconds
_ASK_INTERVAL_S = 1.0


@dataclass(eq=False)
class EndpointService:
    """Connects a started endpoint with a router and sessions; the service closes none of them.
    ``handlers`` and ``gauges`` are added to theirs. When the service closes, running requests have
    ``grace_s`` seconds to end. Without ``restarts`` a lost endpoint is not started again."""

    endpoint: Endpoint
    router: GeneratorRouter
    sessions: Sessions
    _: KW_ONLY
    interval_s: float
    handlers: Mapping[CommandName, Handler] = field(default_factory=dict)
    gauges: Callable[[], Mapping[str, float]] | None = None
    grace_s: float = 5.0
    restarts: EndpointRestarts | None = None

    def __post_init__(self) -> None:
        router, sessions = self.router, self.sessions
        self._engines: Mapping[str, EngineStats] = {}
        self._num_failed_readings = 0
        self._bridge = EndpointBridge(
            self.endpoint,
            complete=sessions.complete,
            handlers={**_router_handlers(router), **sessions.handlers(), **self.handlers},
            status=self._status,
            interval_s=self.interval_s,
            restarts=self.restarts,
        )
        self._running: asyncio.Task[None]

    @property
    def counts(self) -> BridgeCounts:
        return self._bridge.counts

    async def __aenter__(self) -> EndpointService:
        """Return once the endpoint has received the system's status. Raises Exception: the errors
        of `run_until_lost`."""
        self._running = asyncio.create_task(self._run(), name="endpoint bridge")
        self._running.add_done_callback(retrieve)
        ready = asyncio.create_task(self._bridge.ready())
        try:
            await asyncio.wait([ready, self._running], return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                await self.run_until_lost()
        except BaseException:
            await cancel_all([self._running])
            raise
        finally:
            ready.cancel()
        return self

    async def __aexit__(self, *error: object) -> None:
        running = self._running
        self._bridge.end()
        try:
            if self._bridge.is_lost:
                pass
            elif not running.done():
                await self.endpoint.drain(self.grace_s)
            elif running.cancelled() or not isinstance(running.exception(), EndpointLostError):
                await self.endpoint.drain(0.0)  # no running request can end normally
        except EndpointLostError as lost:
            logger.warning("the endpoint did not end cleanly: %s", lost)
        finally:
            await cancel_all([running])

    async def _run(self) -> None:
        await self._bridge.run(self._ask_engines())

    async def run_until_lost(self) -> None:
        """Wait for a failure of the service; never returns.

        Raises:
            EndpointLostError: the endpoint is lost, and is not started again.
            Exception: a task of the service failed; no more requests are served.
        """
        await asyncio.wait([self._running])
        if self._running.cancelled():
            raise EndpointLostError("the service has ended: the endpoint's bridge was cancelled")
        self._running.result()

    async def _ask_engines(self) -> None:
        """Poll the engines. The router decides whether a replica that does not answer is lost."""
        while True:
            try:
                async with asyncio.timeout(_ASK_TIMEOUT_S):
                    self._engines = await self.router.stats()
            except (TorchtitanRLError, TimeoutError):
                self._engines = {}
                self._num_failed_readings += 1
            await asyncio.sleep(_ASK_INTERVAL_S)

    def _status(self) -> SystemStatus:
        router, cause = self.router, ""
        try:
            router.require_unreserved()
        except GenerationError:
            cause = "no replica is left"  # only the controller's log says why
        gauges = {
            **_replica_gauges(router),
            **_engine_gauges(self._engines),
            "failed_engine_readings": self._num_failed_readings,
            **self.counts.gauges(),
            **self.sessions.counts(),
            **({} if self.gauges is None else self.gauges()),
        }
        return SystemStatus(
            is_healthy=not cause,
            cause=cause,
            newest_version=router.newest_version,
            gauges={GAUGE_PREFIX + name: float(value) for name, value in gauges.items()},
        )


def _router_handlers(router: GeneratorRouter) -> dict[CommandName, Handler]:
    """The handlers of administrators' commands, whose arguments `routes` has checked.

    A client's pause also ends when the training run pauses and resumes generation itself.
    """

    async def pause(mode: PauseMode) -> Mapping[str, Any]:
        try:
            await router.pause(mode)
        except GenerationError as error:  # waiting for running requests may take minutes
            message = "generation was resumed before all replicas had stopped"
            raise RefusedError(409, "resumed", message) from error
        return {"is_paused": True, "mode": mode}

    async def resume() -> Mapping[str, Any]:
        await router.resume()
        return {"is_paused": False}

    def versions() -> Mapping[str, Any]:
        return {
            "newest": router.newest_version,
            "replicas": router.versions(),
            "states": {name: state.value for name, state in router.states().items()},
        }

    return {"pause": handler(pause), "resume": handler(resume), "versions": handler(versions)}


def _replica_gauges(router: GeneratorRouter) -> dict[str, float]:
    states = router.states()
    gauges: dict[str, float] = {
        "newest_version": router.newest_version,
        "replicas": len(states),
        "replicas_live": sum(state != Phase.DEAD for state in states.values()),
    }
    for name, version in router.versions().items():
        gauges[_of_replica("replica_version", name)] = version
    for name, tokens in router.outstanding_tokens().items():
        gauges[_of_replica("replica_outstanding_tokens", name)] = tokens
    return gauges


_ENGINE_GAUGES = {
    "engine_running_requests": "running",
    "engine_waiting_requests": "waiting",
    "engine_kv_use": "kv_use",
    "engine_preemptions": "preemptions",
    "engine_generated_tokens": "generated_tokens",
    "engine_tokens_per_second": "tokens_per_second",
    "engine_steps": "steps",
}


def _engine_gauges(engines: Mapping[str, EngineStats]) -> dict[str, float]:
    return {
        _of_replica(gauge, name): getattr(stats, field)
        for name, stats in engines.items()
        for gauge, field in _ENGINE_GAUGES.items()
    }


def _of_replica(name: str, replica: str) -> str:
    return f'{name}{{replica="{replica}"}}'


_OTHER_MODEL = "it is another model than the served one"
# Fields of config.json in which the checkpoint may differ from the served model.
_IGNORED_FIELDS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype"})


class WeightLoader:
    """Loads checkpoints. ``served`` is the directory of the checkpoint that the replicas were
    started with."""

    def __init__(
        self, router: GeneratorRouter, publisher: SharedMemoryPublisher, served: Path
    ) -> None:
        self._router = router
        self._publisher = publisher
        self._served = served
        self._loading = asyncio.Lock()

    async def load(
        self, path: str, *, version: int | None = None, mode: SyncMode = "hot_swap"
    ) -> Mapping[str, Any]:
        """Load a directory in Hugging Face format as ``version`` (default: the next version).
        Returns a `LoadAnswer`. Raises RefusedError: the directory does not fit, the version is not
        new, or another checkpoint is being loaded."""
        if self._loading.locked():
            raise RefusedError(409, "loading", "another checkpoint is being loaded")
        async with self._loading:
            newest = self._router.newest_version
            version = newest + 1 if version is None else version
            if version <= newest:
                message = f"version {version} is not newer than {newest}, which is served"
                raise RefusedError(409, "version_not_newer", message)
            try:
                tensors = await asyncio.to_thread(_read, Path(path), self._served)
            except (OSError, ValueError) as error:
                raise RefusedError(400, "wrong_checkpoint", f"{path}: {error}") from error
            try:
                report = await self._publish(version, tensors, mode)
            except WeightSyncError as error:
                raise RefusedError(503, "not_loaded", f"{path}: {error}") from error
        return {
            "version": version,
            "replicas": dict(self._router.versions()),
            "lost": list(report.lost),
            "stall_s": max((pull.stall_s for pull in report.pulls), default=0.0),
        }

    async def publish(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Make all replicas pull tensors as the next version, which is returned. Raises
        WeightSyncError: the version cannot be published, or no replica is left."""
        async with self._loading:
            version = self._router.newest_version + 1
            await self._publish(version, tensors, "hot_swap")
        return version

    async def _publish(
        self, version: int, tensors: Mapping[str, torch.Tensor], mode: SyncMode
    ) -> SyncReport:
        handle = await asyncio.to_thread(self._publisher.publish, version, tensors)
        return await self._router.sync_weights(handle, mode=mode)

    def handlers(self) -> Mapping[CommandName, Handler]:
        return {"load": handler(self.load)}


def _read(directory: Path, served: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a checkpoint of the served model. Raises OSError, ValueError: the
    checkpoint is unreadable, or belongs to another model."""
    from safetensors import SafetensorError

    config = _config(directory)
    _require_equal_configs(config, _config(served))
    try:
        tensors = _tensors(directory)
        expected = _layout(served)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    if config.get("tie_word_embeddings"):  # then the head may be missing in the files
        tensors.pop("lm_head.weight", None)
        expected.pop("lm_head.weight", None)
    for name in sorted(tensors.keys() | expected.keys()):
        tensor = tensors.get(name)
        shape, is_floating = expected.get(name, (None, True))
        found = None if tensor is None else tuple(tensor.shape)
        if found != shape:
            raise ValueError(f"{_OTHER_MODEL}: {name} has shape {found}, not {shape}")
        if tensor is not None and tensor.dtype.is_floating_point != is_floating:
            kind = "floating-point numbers" if is_floating else "none"
            raise ValueError(f"{name} has {tensor.dtype}; the served model has {kind} there")
    return tensors


def _tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Read all tensors into memory: a memory-mapped file that shrinks would kill this process."""
    from safetensors.torch import load

    tensors: dict[str, torch.Tensor] = {}
    for path in _files(directory):
        found = load(path.read_bytes())
        if twice := sorted(tensors.keys() & found.keys()):
            raise ValueError(f"{path.name} has {twice[0]}, as another file has: write an index")
        tensors |= found
    return tensors


def _layout(directory: Path) -> dict[str, tuple[tuple[int, ...], bool]]:
    """The shape of each tensor, and whether its numbers are floating-point."""
    from safetensors import safe_open

    layout: dict[str, tuple[tuple[int, ...], bool]] = {}
    for path in _files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                layout[name] = (tuple(part.get_shape()), part.get_dtype().startswith(("F", "BF")))
    return layout


def _files(directory: Path) -> list[Path]:
    """The files that the index names, or all files if there is no index."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        named = _json_object(index).get("weight_map")
        names = list(named.values()) if isinstance(named, dict) else []
        if not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise ValueError(f"{index.name} names files that are not in its folder")
        files = [directory / name for name in sorted(set(names))]
    else:
        files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{directory} has no *.safetensors file")
    return files


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return content


def _config(directory: Path) -> dict[str, Any]:
    if not (directory / "config.json").is_file():
        raise ValueError(
            "it is not a Hugging Face directory (it has no config.json); a training run writes one "
            "to RUN/policy (--checkpoint.export-hf), its checkpoints are of another format"
        )
    return _json_object(directory / "config.json")


def _require_equal_configs(config: dict[str, Any], served: dict[str, Any]) -> None:
    config, served = with_flat_rope(config), with_flat_rope(served)
    for name in sorted((config.keys() & served.keys()) - _IGNORED_FIELDS):
        if config[name] != served[name]:
            what = f"config.json has {name} {config[name]!r}, not {served[name]!r}"
            raise ValueError(f"{_OTHER_MODEL}: {what}")
