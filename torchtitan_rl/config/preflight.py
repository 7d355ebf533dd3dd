"""Finds out whether a run can compute on this machine's CUDA devices: `probe_cuda` asks a child
process, and `cuda_errors` judges its answer.

Devices can be counted without a working CUDA: with a driver that is too old, torch quietly computes
on the CPU, and engines fail. To find out, CUDA must be started, and that takes memory of each
device until the process ends. So only the child does it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
_RDMA_DEVICES = Path("/sys/class/infiniband")
_PROBE_TIMEOUT_S = 120.0
_OLDEST_DRIVERS = {"12": "525", "13": "580"}  # of each CUDA version, for any of its minor versions
_OLDEST_CAPABILITIES = {"13": (7, 5)}  # of devices that a CUDA version has compilers for
_BFLOAT16_CAPABILITY = (8, 0)
_EXCHANGE_BYTES = 256 << 20  # of shared memory for NCCL's buffers; containers often give 64 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """A device, as a process sees it that has started CUDA on it."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int

    def __str__(self) -> str:
        major, minor = self.capability
        return f"{self.name} {self.total_bytes / 2**30:.0f} GiB, capability {major}.{minor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaFacts:
    """What a run on CUDA needs to know of its machine."""

    torch: str = ""  # versions: of torch,
    built_for: str = ""  # of the CUDA that torch was built for,
    driver: str = ""  # of NVIDIA's driver,
    driver_cuda: str = ""  # and of the newest CUDA that the driver supports
    error: str = ""  # why torch cannot use CUDA
    devices: tuple[CudaDevice, ...] = ()  # the visible ones
    has_compiler: bool = False  # with Python's headers
    shared_memory_bytes: int = 0  # that are free
    locked_bytes: int | None = None  # that a process may lock; None: no limit, or no RDMA device


@functools.cache
def probe_cuda() -> CudaFacts:
    """Start CUDA in a child process, which takes seconds."""
    command = [sys.executable, "-m", "torchtitan_rl.config.preflight"]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S)
        answer = json.loads(child.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return CudaFacts(error=f"it did not start within {_PROBE_TIMEOUT_S:.0f} s")
    except (IndexError, ValueError):
        last = "".join(child.stderr.splitlines()[-1:])
        return CudaFacts(error=f"a process that starts it ended with {child.returncode}: {last}")
    devices = answer.pop("devices")
    return CudaFacts(
        devices=tuple(
            CudaDevice(**one | {"capability": tuple(one["capability"])}) for one in devices
        ),
        **answer,
    )


def cuda_errors(
    facts: CudaFacts,
    *,
    dtype: str,
    replica_devices: Sequence[int] = (),
    memory_share: float = 0.0,
    exchanges: bool = False,
    locked_bytes: int = 0,
    where: str = "",
) -> list[str]:
    """The errors because of which processes could not compute on a machine: what is wrong, and the
    fix.

    Args:
        replica_devices: positions of the devices that engines use. Each takes ``memory_share``
            (``generator.gpu_memory_utilization``) of the device.
        exchanges: some ranks exchange data on this machine.
        locked_bytes: the size of the weights if they are sent by RDMA.
        where: prefix of the messages, such as ``host1: ``.
    """
    errors = []
    if facts.error:
        errors.append(f"CUDA cannot be used: {_explain(facts)}")
    oldest = _OLDEST_CAPABILITIES.get(facts.built_for.partition(".")[0], (0, 0))
    for number, device in enumerate(facts.devices):
        major, minor = device.capability
        if device.capability < oldest:
            errors.append(
                f"cuda:{number} ({device.name}) has compute capability {major}.{minor}, and torch "
                f"{facts.torch} for CUDA {facts.built_for} needs {oldest[0]}.{oldest[1]}; leave it "
                "out of CUDA_VISIBLE_DEVICES"
            )
        elif dtype == "bfloat16" and device.capability < _BFLOAT16_CAPABILITY:
            errors.append(
                f"policy.dtype is bfloat16: cuda:{number} ({device.name}) has compute capability "
                f"{major}.{minor}, and bfloat16 needs 8.0; give float32"
            )
        share = device.free_bytes / device.total_bytes
        if number in replica_devices and share < memory_share:
            most = int(share * 100) / 100
            errors.append(
                f"generator.gpu_memory_utilization is {memory_share}: cuda:{number} "
                f"({device.name}) has {device.free_bytes / 2**30:.1f} of "
                f"{device.total_bytes / 2**30:.1f} GiB free; end what uses it (nvidia-smi)"
                + (f", or give at most {most}" if most else "")
            )
    if not facts.has_compiler:
        errors.append(
            "no C compiler, or no headers of Python: Triton compiles its kernels with both; "
            "install gcc and python3-dev"
        )
    if exchanges and facts.shared_memory_bytes < _EXCHANGE_BYTES:
        errors.append(
            f"{SHARED_MEMORY} has {facts.shared_memory_bytes >> 20} MiB free: ranks exchange data "
            "through it; in a container, give --shm-size 16g or --ipc=host"
        )
    if facts.locked_bytes is not None and facts.locked_bytes < locked_bytes:
        errors.append(
            f"a process may lock {facts.locked_bytes >> 20} MiB of memory: RDMA locks the weights, "
            f"{locked_bytes >> 20} MiB; run ulimit -l unlimited before the worker starts (in a "
            "container, give --ulimit memlock=-1)"
        )
    return [where + error for error in errors]


def _explain(facts: CudaFacts) -> str:
    major = facts.built_for.partition(".")[0]
    if facts.driver_cuda and int(facts.driver_cuda.partition(".")[0]) < int(major or 0):
        oldest = _OLDEST_DRIVERS.get(major)
        return (
            f"the NVIDIA driver {facts.driver} supports CUDA {facts.driver_cuda}, and torch "
            f"{facts.torch} needs CUDA {facts.built_for}; install a newer driver"
            + (f", at least {oldest}" if oldest else "")
        )
    if not facts.built_for and facts.torch:
        return f"torch {facts.torch} has no CUDA; remove .venv and run make setup ACCELERATOR=cuda"
    return f"{facts.error}; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def has_compiler() -> bool:
    """Whether there is a C compiler, with Python's headers."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return any(map(shutil.which, ("cc", "gcc", "clang"))) and header.is_file()


def _look() -> CudaFacts:
    import torch

    error, devices = "", []
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            devices.append(
                CudaDevice(
                    name=torch.cuda.get_device_name(number),
                    capability=torch.cuda.get_device_capability(number),
                    free_bytes=free,
                    total_bytes=total,
                )
            )
    except (RuntimeError, AssertionError) as cause:
        error = str(cause).splitlines()[0]
    driver = re.search(r"\b\d{3,}(\.\d+)+", DRIVER_FILE.read_text() if DRIVER_FILE.exists() else "")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_limited = soft != resource.RLIM_INFINITY and any(_RDMA_DEVICES.glob("*"))
    return CudaFacts(
        torch=torch.__version__,
        built_for=torch.version.cuda or "",
        driver=driver[0] if driver else "",
        driver_cuda=_driver_cuda(),
        error=error,
        devices=tuple(devices),
        has_compiler=has_compiler(),
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        locked_bytes=soft if is_limited else None,
    )


def _driver_cuda() -> str:
    """The version of CUDA that the driver supports: 13000 is 13.0."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


if __name__ == "__main__":
    print(json.dumps(asdict(_look())))
