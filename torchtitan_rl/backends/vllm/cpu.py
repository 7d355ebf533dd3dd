"""vLLM on a CPU: environment, threads, weights that can be updated, unique shared memory.

vLLM is imported inside the functions: processes that only spawn engines import this module.

Weight updates: vLLM's CPU linears compute from a packed copy and delete the parameter it was made
of, so loading new weights fails half-way, or (a tied head) changes nothing. Here every linear keeps
its parameter: an update loads in place and packs again. The cost is a second copy of the weights.
Measured on 2 cores with 73 M parameters in float32:

| | update | decoding step with 1, 8, 64 running requests |
|---|---|---|
| here | 0.17 s | 32, 35, 116 ms |
| linears that do not pack | 0.06 s | 67, 104, 144 ms |
| vLLM's own reload | 0.18 s | 34, 38, 121 ms |
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

SHM_DIR = Path("/dev/shm")

_Built = TypeVar("_Built")


def engine_environment(threads: int, device: Literal["cpu", "cuda"] = "cpu") -> dict[str, str]:
    """Variables that must be set before an engine process imports torch or vLLM.

    ``threads``: OMP threads of the process. Compilation is off on a CPU: it takes 47 s at the start
    and gains nothing.
    """
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cpu":
        environment |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return environment


def installed_device() -> Literal["cpu", "cuda"]:
    """The device that the installed vLLM is built for, without importing it."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "cuda"
    return "cpu"


def in_temporary_thread(build: Callable[[], _Built]) -> _Built:
    """Call ``build`` in a thread that ends with it.

    libgomp keeps a team for each thread that has computed. Once all teams have more threads than
    there are cores, they sleep between any two operations, which makes an engine with two threads
    that is not stepped in the thread that built it 14 to 29 % slower.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(build).result()


def keep_linear_weights() -> None:
    """Make linears that are built from now on keep their parameters next to the packed copy."""
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    if getattr(pack, "keeps_weights", False):
        return

    def pack_and_keep(layer: Any, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)

    pack_and_keep.keeps_weights = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = pack_and_keep


def repack_linears(model: Any) -> None:
    """Pack every linear of the model again from its parameters, a tied head included."""
    from vllm.model_executor.layers import utils

    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)


@contextlib.contextmanager
def unique_shared_memory(rank: int) -> Iterator[None]:
    """Give the engine that is built in this block its own names in /dev/shm.

    vLLM's names are the same for every tensor-parallel engine of a host. The torch.distributed
    environment variables must be set; the default gloo group is created here. The names are removed
    at the end of the block, while the mappings stay, so a killed process leaks no memory.
    """
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="env://")
    token = [f"ttrl-{os.getpid()}-{uuid.uuid4().hex[:12]}"]
    dist.broadcast_object_list(token, src=0)
    make_name = _CPUSHMDistributed.make_group_name

    def make_unique_name(communicator: Any) -> str:
        # No inner slash is allowed; vLLM's own name would begin with the launcher's "//".
        return f"{token[0]}-{make_name(communicator).replace('/', '')}"

    _CPUSHMDistributed.make_group_name = staticmethod(make_unique_name)
    try:
        yield
        dist.barrier()
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(make_name)
        if rank == 0:
            for path in SHM_DIR.glob(f"*{token[0]}*"):
                path.unlink(missing_ok=True)
