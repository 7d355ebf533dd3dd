"""Loads a checkpoint from a directory into the replicas of a stand-alone server, while it serves.

The weights are published as a new policy version, just as a trainer publishes weights. Each replica
pulls them between two steps and resets its prefix cache. Answers have the exact version of each
token.

Invariants: one checkpoint is loaded at a time. A checkpoint that does not fit the served model is
refused before any replica sees it. Exactly the checked tensors are published: files are first read
into memory, so that rewriting a file during the load has no effect.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.rope_fields import with_flat_rope
from torchtitan_rl.routing.router import GeneratorRouter
from torchtitan_rl.routing.weights import SyncMode
from torchtitan_rl.serving.errors import RefusedError
from torchtitan_rl.serving.link import CommandName, Handler
from torchtitan_rl.weights.shm import SharedMemoryPublisher

if TYPE_CHECKING:
    import torch

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

        Returns:
            The new version, the version of each replica, and the replicas that were lost.

        Raises:
            RefusedError: the directory does not fit, the version is not new, or another checkpoint
                is being loaded.
        """
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
                handle = await asyncio.to_thread(self._publisher.publish, version, tensors)
                report = await self._router.sync_weights(handle, mode=mode)
            except WeightSyncError as error:
                raise RefusedError(503, "not_loaded", f"{path}: {error}") from error
        return {
            "version": version,
            "replicas": dict(self._router.versions()),
            "lost": list(report.lost),
            "stall_s": max((pull.stall_s for pull in report.pulls), default=0.0),
        }

    def handlers(self) -> Mapping[CommandName, Handler]:
        async def load(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
            return await self.load(**arguments)

        return {"load": load}


def _read(directory: Path, served: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a checkpoint of the served model.

    Raises:
        OSError, ValueError: the checkpoint is unreadable, or belongs to another model.
    """
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
            raise ValueError(
                f"{_OTHER_MODEL}: {name} has shape {found}; in the served model {shape}"
            )
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
            raise ValueError(
                f"{_OTHER_MODEL}: config.json has {name} {config[name]!r}; the served model has "
                f"{served[name]!r}"
            )
