"""vLLM on a CPU: environment, weights that can be updated, unique shared memory.

vLLM is imported inside the functions: processes that only spawn engines import this module.

vLLM's CPU linears compute from a packed copy of their parameter and delete the parameter. Loading
new weights then fails half-way, where the parameter is missing. A head that is tied to the
embedding keeps its parameter, but goes on computing from the packed copy of the old weights. In
this module every linear keeps its parameter: an update loads new weights into the parameters, and
packs them again. This costs a second copy of the weights. Measured on 2 cores with 73 M parameters
in float32, an update takes 0.17 s, as vLLM's own reload does, and a decoding step takes 32 to 116
ms with 1 to 64 running requests; with linears that do not pack, 0.06 s and 67 to 144 ms.

Experts (MoE) are packed under the names of their parameters: a loader writes new weights into the
packed ones, and vLLM's own reload leaves them unpacked, both without an error. Here the parameters
stay as they are, and layers compute from packed copies.
"""

from __future__ import annotations

import contextlib
import copy
import os
import uuid
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

SHM_DIR = Path("/dev/shm")


def engine_environment(
    threads: int, device: Literal["cpu", "cuda"] = "cpu", *, batch_invariant: bool = False
) -> dict[str, str]:
    """Return the variables that must be set before an engine process imports torch or vLLM.

    On a CPU, compilation is off, because it takes 47 s at the start and makes nothing faster. So is
    vLLM's latent attention (MLA), which has no prefix cache there, and only a kernel for vectors of
    512 + 64 elements: keys and values of all heads are kept instead.

    On CUDA, FlashInfer's sampler is off, because its package has no compiled kernels: the first
    request with a top_p or top_k but without logprobs would run nvcc inside a step, which fails or
    takes a minute. A user who has compiled kernels may set the variable. vLLM's messages are
    written to the log, because a start takes minutes.
    """
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if device == "cpu":
        environment |= {
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_MLA_DISABLE": "1",
        }
    else:
        sampler = "VLLM_USE_FLASHINFER_SAMPLER"
        environment |= {sampler: os.environ.get(sampler, "0"), "VLLM_LOGGING_LEVEL": "INFO"}
    if batch_invariant:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    return environment


def installed_device() -> Literal["cpu", "cuda"]:
    """Return the device that the installed vLLM is built for, without importing vLLM."""
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return "cuda"
    return "cpu"


def keep_linear_weights() -> None:
    """Make every linear that is built after this call keep its parameter next to the packed
    copy."""
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    if getattr(pack, "keeps_weights", False):
        return

    def pack_and_keep(layer: Any, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)

    pack_and_keep.keeps_weights = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = pack_and_keep


def keep_expert_weights() -> None:
    """Make every layer with experts that is built after this call compute from packed copies, next
    to its parameters."""
    import torch
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    if hasattr(CPUUnquantizedExperts, "packed"):
        return
    pack, compute = (
        CPUUnquantizedExperts.process_weights_after_loading,
        CPUUnquantizedExperts.apply,
    )

    def pack_copies(self: Any, layer: torch.nn.Module) -> None:
        copied = copy.copy(layer)
        copied._parameters = dict(layer._parameters)
        pack(self, copied)  # pads and packs into new parameters
        self.packed = {"w1": copied.w13_weight, "w2": copied.w2_weight}

    def compute_packed(self: Any, **arguments: Any) -> None:
        if (numbers := arguments["expert_map"]) is not None:
            # With expert parallelism, vLLM's kernel would take a rank's own experts for the first
            # ones of all, and read past their end.
            ids_TK = numbers[arguments["topk_ids"]]
            weights_TK = arguments["topk_weights"] * (ids_TK >= 0)
            arguments |= {"topk_ids": ids_TK.clamp(min=0), "topk_weights": weights_TK}
        compute(self, **(arguments | self.packed))

    CPUUnquantizedExperts.packed = {}
    CPUUnquantizedExperts.process_weights_after_loading = pack_copies
    CPUUnquantizedExperts.apply = compute_packed


def repack(model: Any) -> None:
    """Pack every linear of the model again, including a tied head, and all experts."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    for module in model.modules():
        if hasattr(module, "cpu_linear"):
            utils.dispatch_cpu_unquantized_gemm(module, remove_weight=False)
        elif isinstance(module, RoutedExperts):
            experts = module.quant_method.moe_kernel.fused_experts
            experts.process_weights_after_loading(module)


@contextlib.contextmanager
def unique_shared_memory(rank: int) -> Iterator[None]:
    """Give the engine that is built in this block its own names in /dev/shm; all tensor-parallel
    engines on a host would have the same.

    The torch.distributed environment variables must be set; the default gloo group is created here.
    At the end of the block the names are removed, but the memory stays mapped: a process that is
    killed later leaks none.
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
