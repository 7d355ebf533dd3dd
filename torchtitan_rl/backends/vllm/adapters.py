"""LoRA adapters of one vLLM engine: those that ``serve`` loads at its start, that of a run, and
those of the runs that share the engine (its tenants).

A run's policy with adapters is the base that the engine was built with and one adapter, which every
request uses. A pull replaces it in place, between two steps; running requests go on with the new
one. vLLM reads adapters from folders, so a pulled one is written to a folder in shared memory,
which no other user can read, and which is removed when vLLM has read it. A tenant's adapter is
loaded into one of its slots by a pull, too, under a name of its own, which later requests give.

Invariants
- A version is loaded only if it has exactly the tensors of the run's adapter, in their shapes. vLLM
  itself would take a version that lacks some.
- Prefix blocks of an earlier version are not read: vLLM keys blocks by an adapter's name, which is
  the same for all versions, so `VllmEngine` salts them with the number of the pull.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_rl.backends.specs import GeneratorSpec
from torchtitan_rl.config.lora import (
    TARGETS,
    AdapterFolder,
    LoraConfig,
    TenantSlots,
    adapter_shapes,
    engine_rank,
    largest_rank,
    read_slot,
    slot_adapter,
    write_adapter,
)
from torchtitan_rl.config.model import read_architecture
from torchtitan_rl.errors import WeightSyncError
from torchtitan_rl.weights.shm_cleanup import (
    HEADROOM_BYTES,
    SHARED_MEMORY_ROOT,
    folder_name,
    make_folder,
)

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

_POLICY, _POLICY_ID = "policy", 1
_PACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
_PACKED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def adapter_arguments(
    adapters: LoraConfig | TenantSlots | Sequence[AdapterFolder],
) -> dict[str, Any]:
    """Return the arguments of vLLM's ``EngineArgs`` for an engine with the adapter of a run, with
    slots for those of several runs, or with several adapters."""
    if isinstance(adapters, LoraConfig):
        number, rank, targets = 1, engine_rank(adapters.rank), set[str](adapters.target_modules)
    elif isinstance(adapters, TenantSlots):
        number, rank, targets = adapters.num_slots + 1, engine_rank(adapters.rank), {*TARGETS}
    else:
        # One more than adapters: on a CPU, rows without an adapter otherwise get the last one.
        number, rank = len(adapters) + 1, largest_rank(adapters)
        targets = {target for one in adapters for target in one.targets}
    if not rank:
        return {}
    # Other layers would compute with adapters of zeros.
    only = sorted({_PACKED.get(one, one) for one in targets}) if targets <= {*TARGETS} else None
    return {
        "enable_lora": True,
        "max_loras": number,
        "max_lora_rank": rank,
        "lora_target_modules": only,
    }


def adapter_requests(adapters: Sequence[AdapterFolder]) -> dict[str, LoRARequest]:
    """Return what vLLM's requests with these adapters have, by name. Clients see the path in it,
    which is therefore the name: an engine has loaded the adapters before."""
    from vllm.lora.request import LoRARequest

    return {
        one.name: LoRARequest(one.name, number, one.name)
        for number, one in enumerate(adapters, start=1)
    }


class EngineAdapters:
    def __init__(self, engine: Any, spec: GeneratorSpec) -> None:
        from vllm.lora.request import LoRARequest

        self._engine = engine
        self._model = spec.model
        self._lora = spec.lora or LoraConfig()
        self._requests: dict[str, LoRARequest] = adapter_requests(spec.adapters)
        for one in spec.adapters:
            number = self._requests[one.name].lora_int_id
            engine.add_lora(LoRARequest(one.name, number, str(one.path)))
        if spec.lora is not None:
            # At first an adapter that changes nothing. Its path is never read, because it stays
            # loaded.
            self._requests[""] = LoRARequest(_POLICY, _POLICY_ID, _POLICY)
            self._shapes = adapter_shapes(read_architecture(spec.model), spec.lora)
            tensors = {name: torch.zeros(shape) for name, shape in self._shapes.items()}
            self._load(self._requests[""], self._lora, tensors, version=0)

    def request(self, name: str) -> LoRARequest | None:
        """Return what vLLM's requests with this adapter have; None for the model alone. Raises
        ValueError: there is no such adapter."""
        if name and name not in self._requests:
            raise ValueError(f"there is no adapter {name!r}")
        return self._requests.get(name)

    def replace(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Use another version of a run's adapter from the next step on. Raises WeightSyncError: the
        tensors are not those of the adapter, or vLLM cannot load them."""
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != self._shapes:
            wrong = sorted(set(found.items()) ^ set(self._shapes.items()))
            raise WeightSyncError(
                f"version {version}: its tensors are not those of an adapter of rank "
                f"{self._lora.rank} on {self._model}: {wrong[:2]}"
            )
        self._load(self._requests[""], self._lora, tensors, version)

    def fill_slot(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Load what the server published as ``version`` (`slot_tensors`). No running request has
        the adapter that was in its slot. Raises WeightSyncError: vLLM cannot load the adapter."""
        from vllm.lora.request import LoRARequest

        slot, lora, own = read_slot(tensors)
        name = slot_adapter(slot, version)
        new = LoRARequest(name, slot + 1, name)
        self._load(new, lora, own, version)
        kept = {n: one for n, one in self._requests.items() if one.lora_int_id != new.lora_int_id}
        self._requests = kept | {name: new}

    def _load(
        self,
        request: LoRARequest,
        lora: LoraConfig,
        tensors: Mapping[str, torch.Tensor],
        version: int,
    ) -> None:
        from vllm.lora.request import LoRARequest

        try:
            folder, lock = _private_folder(sum(tensor.nbytes for tensor in tensors.values()))
            try:
                write_adapter(folder, lora, tensors, base=str(self._model))
                name, number = request.lora_name, request.lora_int_id
                new = LoRARequest(name, number, str(folder), load_inplace=True)
                if not self._engine.add_lora(new):
                    raise RuntimeError("vLLM has not added the adapter")
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                if lock is not None:
                    os.close(lock)
        except Exception as cause:  # of many types
            raise WeightSyncError(f"version {version} cannot be loaded: {cause!r}") from cause


def _private_folder(num_bytes: int) -> tuple[Path, int | None]:
    """Make a folder that only this user can read. Returns it, and its lock. It is in shared memory,
    where a later command removes it if this process is killed; without room there, on the disk."""
    try:
        if shutil.disk_usage(SHARED_MEMORY_ROOT).free - HEADROOM_BYTES > num_bytes:
            folder = SHARED_MEMORY_ROOT / folder_name("adapter")
            return folder, make_folder(folder)
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="torchtitan-rl-adapter-")), None
