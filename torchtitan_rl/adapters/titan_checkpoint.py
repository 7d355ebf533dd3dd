"""The trainer's state on disk: sharded tensors by torch's distributed checkpoint, the rest as JSON.

A directory holds model and optimizer (any layout can load what another wrote), the random state of
each rank, and ``trainer.json``, written last: version and whatever the caller adds.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from torchtitan_rl.adapters.titan_optim import PolicyOptimizer
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.training.checkpoints import MARKER, publish, temporary_path


def save_state(
    path: Path, model: Any, optimizer: PolicyOptimizer, *, version: int, extra: dict[str, Any]
) -> None:
    """Collective. All or nothing: ``path`` appears when everything is in it."""
    document = json.dumps({"version": version, "ranks": dist.get_world_size(), "extra": extra})
    temporary = temporary_path(path)
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    save(_state(model, optimizer), checkpoint_id=temporary)
    torch.save(_random_state(), temporary / f"random-{dist.get_rank()}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        with open(temporary / MARKER, "w") as marker:
            marker.write(document + "\n")
            marker.flush()
            os.fsync(marker.fileno())
        publish(path)
    dist.barrier()


def load_state(path: Path, model: Any, optimizer: PolicyOptimizer) -> tuple[int, dict[str, Any]]:
    """Collective. Returns (version, extra).

    Random states are restored only by as many ranks as wrote them.

    Raises:
        ConfigError: ``path`` is not a complete checkpoint.
    """
    if not (path / MARKER).is_file():
        raise ConfigError(f"checkpoint {path} has no {MARKER}: it is not complete; use another")
    document = json.loads((path / MARKER).read_text())
    state = _state(model, optimizer)
    load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    optimizer.container.load_state_dict(state["optimizer"])
    optimizer.restore_schedule(document["version"])
    if document["ranks"] == dist.get_world_size():
        random = torch.load(path / f"random-{dist.get_rank()}.pt", weights_only=True)
        torch.set_rng_state(random["cpu"])
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"])
    return document["version"], document["extra"]


def _state(model: Any, optimizer: PolicyOptimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.container.state_dict()}


def _random_state() -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state
