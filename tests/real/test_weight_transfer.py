"""Weights between two real Monarch processes, by both transports."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import torch
from monarch.actor import Actor, concurrent_endpoint, this_host

from torchtitan_rl.backends.monarch.rdma import MonarchRdmaPublisher, MonarchRdmaReader
from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights.handle import WeightHandle
from torchtitan_rl.weights.leftovers import SHARED_MEMORY_ROOT
from torchtitan_rl.weights.shared_memory import SharedMemoryPublisher
from torchtitan_rl.weights.staging import WeightStaging
from torchtitan_rl.weights.transport import Transport, WeightPublisher


def make_weights(version: int) -> dict[str, torch.Tensor]:
    """About 6 MB with a transposed and a tied tensor, different in each version."""
    generator = torch.Generator().manual_seed(version)
    embedding = torch.randn(1000, 1000, generator=generator)
    return {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        "model.norm.weight": torch.randn(7, generator=generator).bfloat16(),
        "model.layers.0.mlp.weight": torch.randn(300, 500, generator=generator).t(),
    }


def digest(tensors: Any) -> dict[str, str]:
    return {
        name: hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in tensors.items()
    }


class TrainerSide(Actor):
    def __init__(self, transport: Transport, run_dir: Path) -> None:
        self._publisher: WeightPublisher = (
            SharedMemoryPublisher("transfer-test", run_dir)
            if transport is Transport.SHARED_MEMORY
            else MonarchRdmaPublisher()
        )

    @concurrent_endpoint
    async def publish(self, version: int, keep: frozenset[int]) -> WeightHandle:
        return await asyncio.to_thread(
            self._publisher.publish, version, make_weights(version), keep=keep
        )

    @concurrent_endpoint
    async def publish_broken(self, version: int) -> str:
        """A tensor without data cannot be written."""
        tensors = make_weights(version) | {"z": torch.empty(3, device="meta")}
        try:
            await asyncio.to_thread(self._publisher.publish, version, tensors)
        except NotImplementedError as error:
            return str(error)
        return ""

    @concurrent_endpoint
    async def close(self) -> None:
        await asyncio.to_thread(self._publisher.close)


class GeneratorSide(Actor):
    def __init__(self) -> None:
        self._staging = WeightStaging(MonarchRdmaReader(timeout_s=60))

    @concurrent_endpoint
    async def stage(self, handle: WeightHandle) -> dict[str, str]:
        """Digests of what arrived, or the error."""
        try:
            await asyncio.to_thread(self._staging.stage, handle)
        except WeightSyncError as error:
            return {"error": str(error)}
        return digest(self._staging.tensors(handle.version))

    @concurrent_endpoint
    async def keep_from(self, version: int) -> tuple[int, ...]:
        self._staging.discard_before(version)
        return self._staging.versions


def shared_files() -> set[str]:
    return {path.name for path in SHARED_MEMORY_ROOT.glob("torchtitan-rl-transfer-test-*/*")}


async def check(transport: Transport, trainer: Any, generator: Any) -> None:
    handles = {}
    none: frozenset[int] = frozenset()
    for version in (0, 1, 2):
        handles[version] = await trainer.publish.call_one(version, none)
        arrived = await generator.stage.call_one(handles[version])
        assert arrived == digest(make_weights(version))
    assert await generator.keep_from.call_one(2) == (2,)
    # Version 1 is the previous one, still readable; version 0 is gone.
    assert await generator.stage.call_one(handles[1]) == digest(make_weights(1))
    gone = await generator.stage.call_one(handles[0])
    assert gone["error"].startswith("version 0")
    if transport is Transport.SHARED_MEMORY:
        assert shared_files() == {"v1.safetensors", "v2.safetensors"}
    # A version that is kept outlives the one before the current one.
    for version in (3, 4):
        handles[version] = await trainer.publish.call_one(version, frozenset({2}))
    assert await generator.keep_from.call_one(5) == ()
    for version in (2, 3, 4):
        arrived = await generator.stage.call_one(handles[version])
        assert arrived == digest(make_weights(version))
    # A version whose write failed halfway is nowhere; the current one is still served.
    assert await trainer.publish_broken.call_one(5)
    assert await generator.keep_from.call_one(5) == ()
    assert await generator.stage.call_one(handles[4]) == digest(make_weights(4))
    if transport is Transport.SHARED_MEMORY:
        assert shared_files() == {"v4.safetensors"}
    await trainer.close.call_one()
    await generator.keep_from.call_one(5)
    assert "error" in await generator.stage.call_one(handles[4])
    assert shared_files() == set()


def test_weights_arrive_whole_are_replaced_and_go_away_by_either_transport(tmp_path: Path) -> None:
    async def check_all() -> None:
        meshes = [this_host().spawn_procs(per_host={"gpus": 1}) for _ in range(2)]
        try:
            for way in Transport:
                trainer = meshes[0].spawn(f"trainer_{way.value}", TrainerSide, way, tmp_path)
                generator = meshes[1].spawn(f"generator_{way.value}", GeneratorSide)
                await check(way, trainer, generator)
        finally:
            for mesh in meshes:
                await mesh.stop()

    asyncio.run(check_all())
