"""How an engine gets its adapters, without an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ready_configs import ready
from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.backends.vllm.adapters import EngineAdapters, adapter_arguments
from torchtitan_rl.config.lora import (
    ADAPTER_WEIGHTS,
    AdapterFolder,
    LoraConfig,
    adapter_shapes,
    write_adapter,
)
from torchtitan_rl.config.model import read_architecture
from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights import shm_cleanup

LORA = LoraConfig(rank=4)


class Engine:
    """Reads what it is given to load."""

    def __init__(self) -> None:
        self.loaded: list[SimpleNamespace] = []
        self.adds = True

    def add_lora(self, request: Any) -> bool:
        folder = Path(request.lora_path)
        found = SimpleNamespace(
            name=request.lora_name,
            number=request.lora_int_id,
            replaces=request.load_inplace,
            folder=folder,
            mode=folder.stat().st_mode & 0o777,
            tensors=load_file(folder / ADAPTER_WEIGHTS),
        )
        self.loaded.append(found)
        return self.adds


@pytest.fixture
def spec(tmp_path: Path) -> GeneratorSpec:
    config, _ = ready("alphabet_sort_tiny", tmp_path)
    return GeneratorSpec(model=Path(config.policy.checkpoint), lora=LORA)


def version_of(spec: GeneratorSpec, value: float) -> dict[str, torch.Tensor]:
    shapes = adapter_shapes(read_architecture(spec.model), LORA)
    return {name: torch.full(shape, value) for name, shape in shapes.items()}


def test_a_pulled_adapter_replaces_the_first_one_which_changes_nothing(
    spec: GeneratorSpec,
) -> None:
    engine = Engine()
    adapters = EngineAdapters(engine, spec)
    adapters.replace(version_of(spec, 2.0), 1)
    first, second = engine.loaded
    assert all(not tensor.any() for tensor in first.tensors.values())
    assert all((tensor == 2.0).all() for tensor in second.tensors.values())
    assert (first.name, first.number) == (second.name, second.number) == ("policy", 1)
    assert second.replaces
    request = adapters.request("")
    assert request is not None
    assert (request.lora_int_id, request.load_inplace) == (1, False)


@pytest.mark.parametrize("has_room", [True, False])
def test_the_folder_of_a_pulled_adapter_is_private_and_is_removed(
    has_room: bool, spec: GeneratorSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_room:
        name = "torchtitan_rl.backends.vllm.adapters.HEADROOM_BYTES"
        monkeypatch.setattr(name, 1 << 60)
    engine = Engine()
    adapters = EngineAdapters(engine, spec)
    engine.adds = False
    with pytest.raises(WeightSyncError, match="version 7 cannot be loaded"):
        adapters.replace(version_of(spec, 1.0), 7)
    assert len(engine.loaded) == 2
    for one in engine.loaded:
        assert one.mode == 0o700
        assert not one.folder.exists()
        assert (one.folder.parent == shm_cleanup.SHARED_MEMORY_ROOT) is has_room
        # What a killed engine leaves there is removed by the next command.
        assert bool(shm_cleanup._FOLDER.fullmatch(one.folder.name)) is has_room


def test_a_version_of_other_tensors_is_refused_before_the_engine_reads_it(
    spec: GeneratorSpec,
) -> None:
    engine = Engine()
    adapters = EngineAdapters(engine, spec)
    tensors = version_of(spec, 1.0)
    first = next(iter(tensors))
    for wrong in (
        {name: one for name, one in tensors.items() if name != first},
        tensors | {"more": torch.ones(1, 1)},
        tensors | {first: tensors[first][:2]},
    ):
        with pytest.raises(WeightSyncError, match="version 3: its tensors are not those"):
            adapters.replace(wrong, 3)
    assert len(engine.loaded) == 1


def test_served_adapters_are_loaded_from_their_folders(spec: GeneratorSpec, tmp_path: Path) -> None:
    folders = []
    for number, name in enumerate(("a", "b"), start=1):
        folder = tmp_path / name
        folder.mkdir()
        write_adapter(folder, LORA, version_of(spec, float(number)), base="base")
        folders.append(AdapterFolder(name=name, path=folder, rank=4, targets=("q_proj",)))
    engine = Engine()
    adapters = EngineAdapters(engine, replace(spec, lora=None, adapters=tuple(folders)))
    assert [(one.name, one.number, one.folder) for one in engine.loaded] == [
        ("a", 1, tmp_path / "a"),
        ("b", 2, tmp_path / "b"),
    ]
    assert adapters.request("") is None
    request = adapters.request("b")
    assert request is not None
    assert (request.lora_name, request.lora_int_id) == ("b", 2)
    assert str(tmp_path) not in request.lora_path
    with pytest.raises(ValueError, match="there is no adapter 'c'"):
        adapters.request("c")
    arguments = adapter_arguments(folders)
    assert arguments["max_loras"] == 3
    assert arguments["max_lora_rank"] == 8
    assert arguments["lora_target_modules"] == ["qkv_proj"]
    assert adapter_arguments(()) == {}
