"""Loading checkpoints into a stand-alone server: what is refused, and what the replicas get."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.async_tests import on_event_loop
from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.routing.weights import SyncReport
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.service import WeightLoader
from torchtitan_rl.types import PullReport
from torchtitan_rl.weights.distribution import SharedMemoryHandle

CONFIG = {"hidden_size": 2, "tie_word_embeddings": True}
TENSORS = {"embed": torch.zeros(3, 2), "norm": torch.ones(2)}


class Published:
    """A publisher and a router: replicas hold what was published last."""

    def __init__(self) -> None:
        self.newest_version = 0
        self.tensors: dict[str, torch.Tensor] = {}
        self.modes: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_lost = False

    def publish(self, version: int, tensors: Any, *, keep: Any = frozenset()) -> SharedMemoryHandle:
        self.tensors = dict(tensors)
        return SharedMemoryHandle(version=version, path="/dev/shm/v", num_bytes=1)

    def close(self) -> None: ...

    def versions(self) -> dict[str, int]:
        return {"r0": self.newest_version}

    async def sync_weights(self, handle: Any, *, mode: str) -> SyncReport:
        await self.gate.wait()
        if self.is_lost:
            raise WeightSyncError("no replica is left")
        self.newest_version = handle.version
        self.modes.append(mode)
        pull = PullReport(
            version=handle.version, stall_s=0.25, running_requests=0, recomputed=False
        )
        return SyncReport(version=handle.version, stage_s=1.0, pull_s=1.0, pulls=(pull,))


INDEX = "model.safetensors.index.json"


def checkpoint(folder: Path, config: Any = CONFIG, tensors: Any = TENSORS) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file(tensors, folder / "model.safetensors")
    return folder


async def refusal(work: Any) -> tuple[int, str, str]:
    with pytest.raises(RefusedError) as caught:
        await work
    refusal = caught.value
    return refusal.status, refusal.code, refusal.message


@on_event_loop
async def test_a_checkpoint_of_the_served_model_becomes_the_next_version(tmp_path) -> None:
    served = checkpoint(tmp_path / "served")
    new = {**TENSORS, "norm": torch.full((2,), 7.0), "lm_head.weight": torch.zeros(3, 2)}
    path = checkpoint(tmp_path / "new", {**CONFIG, "transformers_version": "9"}, new)
    parts = Published()
    loader = WeightLoader(parts, parts, served)
    answer = await loader.load(str(path))
    assert answer == {"version": 1, "replicas": {"r0": 1}, "lost": [], "stall_s": 0.25}
    assert parts.tensors["norm"].tolist() == [7.0, 7.0]
    assert set(parts.tensors) == set(TENSORS)  # the tied head is not published
    assert (await loader.load(str(path), version=12, mode="drain"))["version"] == 12
    assert parts.modes == ["hot_swap", "drain"]
    assert (await refusal(loader.load(str(path), version=12)))[:2] == (409, "version_not_newer")


@pytest.mark.parametrize(
    ("config", "tensors", "cause"),
    [
        (CONFIG, None, "has no *.safetensors file"),
        ([], TENSORS, "config.json is no JSON object"),
        ({**CONFIG, "hidden_size": 4}, TENSORS, "another model than the served one: config.json"),
        ({**CONFIG, "rope_theta": 5e5}, TENSORS, "config.json has rope_theta 500000.0, not"),
        (
            {**CONFIG, "rope_parameters": {"rope_theta": 5e5}},
            TENSORS,
            "config.json has rope_theta 500000.0, not 10000.0",
        ),
        (CONFIG, {"embed": torch.zeros(3, 2)}, "another model than the served one: norm has"),
        (CONFIG, {**TENSORS, "norm": torch.ones(3)}, "norm has shape (3,)"),
        (CONFIG, {**TENSORS, "bias": torch.ones(3)}, "bias has shape (3,), not None"),
        *(
            (
                CONFIG,
                {**TENSORS, "norm": torch.ones(2, dtype=dtype)},
                f"norm has {dtype}; the served",
            )
            for dtype in (torch.int8, torch.bool, torch.complex64)
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_reaches_no_replica(tmp_path, config, tensors, cause):
    async def scenario() -> None:
        parts = Published()
        loader = WeightLoader(parts, parts, checkpoint(tmp_path / "served"))
        path = checkpoint(tmp_path / "new", config, tensors)
        status, code, message = await refusal(loader.load(str(path)))
        assert (status, code) == (400, "wrong_checkpoint")
        assert cause in message
        assert parts.tensors == {}

    asyncio.run(scenario())


@on_event_loop
async def test_the_index_says_which_files_are_of_the_checkpoint(tmp_path) -> None:
    parts = Published()
    loader = WeightLoader(parts, parts, checkpoint(tmp_path / "served"))
    new = checkpoint(tmp_path / "new")
    save_file({"norm": torch.full((2,), 9.0)}, new / "stale.safetensors")
    assert "stale.safetensors has norm, as another" in (await refusal(loader.load(str(new))))[2]
    index = {"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}
    (new / INDEX).write_text(json.dumps(index))
    await loader.load(str(new))
    assert parts.tensors["norm"].tolist() == [1.0, 1.0]
    for content, cause in (
        ('{"weight_map": {"norm": "../served/model.safetensors"}}', "not in its folder"),
        ('{"weight_map": {"norm": 3}}', "not in its folder"),
        ('{"weight_map": {"norm": "gone.safetensors"}}', "gone.safetensors"),
        ("{}", "has no *.safetensors file"),
        ("[" * 100_000, "nested too deeply"),
    ):
        (new / INDEX).write_text(content)
        status, code, message = await refusal(loader.load(str(new)))
        assert (status, code) == (400, "wrong_checkpoint")
        assert cause in message


@on_event_loop
async def test_files_that_cannot_be_read_and_lost_replicas_are_refusals(tmp_path) -> None:
    parts = Published()
    loader = WeightLoader(parts, parts, checkpoint(tmp_path / "served"))
    status, code, message = await refusal(loader.load(str(tmp_path / "none")))
    assert (status, code) == (400, "wrong_checkpoint")
    assert "it is not a Hugging Face directory" in message
    assert "RUN/policy" in message
    torn = checkpoint(tmp_path / "torn")
    (torn / "model.safetensors").write_bytes(b"torn")
    assert (await refusal(loader.load(str(torn))))[:2] == (400, "wrong_checkpoint")
    parts.is_lost = True
    answer = await refusal(loader.load(str(tmp_path / "served")))
    assert answer[:2] == (503, "not_loaded")
