"""The servers that `benchmarks.serving` compares. All processes of both sides use the same cores.

Every process of a side has a tag in its environment, by which it is found even after its parent has
ended. So the CPU seconds are those of the whole side.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.training_runs import ROOT
from torchtitan_rl.backends.vllm.cpu import engine_environment
from torchtitan_rl.config.checks import CPU_BLOCK_TOKENS

_TAG = "TORCHTITAN_RL_BENCHMARK"
_START_S = 600.0
_STOP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags:
    """The settings that the engines of both sides share."""

    model: Path
    max_model_len: int
    max_running_requests: int
    kv_cache_bytes: int


@dataclass(slots=True, kw_only=True)
class Server:
    """The server of one side."""

    name: str
    command: Sequence[str]
    port: int
    log: Path
    environment: Mapping[str, str]
    cores: Sequence[int]
    tag: str = field(default_factory=lambda: str(uuid.uuid4()))
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                ["taskset", "-c", ",".join(map(str, self.cores)), *self.command],
                cwd=ROOT,
                env=os.environ | dict(self.environment) | {_TAG: self.tag},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until the server answers. Raises SystemExit if it does not answer in time."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and self.process and self.process.poll() is None:
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5)
                return
            time.sleep(0.5)
        self.stop()
        raise SystemExit(f"{self.name} did not start:\n{self.log.read_text()[-3000:]}")

    def processes(self) -> list[psutil.Process]:
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_TAG) == self.tag:
                    found[process.pid] = process
                    # vLLM's engine writes its title over its environment.
                    found |= {child.pid: child for child in process.children(recursive=True)}
        return list(found.values())

    def cpu_seconds(self) -> dict[str, float]:
        """The CPU seconds of each process since its start, by its pid and title."""
        seconds = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                seconds[f"{process.pid} {_title(process)}"] = times.user + times.system
        return seconds

    def stop(self) -> None:
        """Stop the server, and kill it if it has not ended after some time. No process is left."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_S)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


def ours(flags: EngineFlags, *, cores: Sequence[int], replicas: int, folder: Path) -> Server:
    """Our side: ``torchtitan-rl serve``."""
    port = _free_port()
    command = [
        *(sys.executable, "-m", "torchtitan_rl.commands.cli", "serve", str(flags.model)),
        *("--endpoint.port", str(port), "--endpoint.model-name", "policy"),
        *("--endpoint.start-timeout-s", str(_START_S)),
        *("--generator.start-timeout-s", str(_START_S)),
        *("--generator.replicas", str(replicas)),
        *("--generator.max-model-len", str(flags.max_model_len)),
        *("--generator.max-running-requests", str(flags.max_running_requests)),
        *("--generator.kv-cache-bytes", str(flags.kv_cache_bytes)),
        *("--log-dir", str(folder / "ours")),
    ]
    return Server(
        name="torchtitan-rl serve",
        command=command,
        port=port,
        log=folder / "ours.log",
        environment={},
        cores=cores,
    )


def own(
    flags: EngineFlags, *, cores: Sequence[int], folder: Path, more: Sequence[str] = ()
) -> Server:
    """vLLM's own server. ``more`` are further flags of its command line, which take precedence."""
    port = _free_port()
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(flags.model), "--served-model-name", "policy"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--seed", "0", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", str(flags.max_model_len)),
        *("--max-num-seqs", str(flags.max_running_requests)),
        *("--max-num-batched-tokens", str(max(4096, flags.max_model_len))),
        *("--kv-cache-memory-bytes", str(flags.kv_cache_bytes)),
        *("--block-size", str(CPU_BLOCK_TOKENS)),
        *("--logprobs-mode", "processed_logprobs", "--no-enable-chunked-prefill"),
        *("--no-async-scheduling", "--disable-uvicorn-access-log"),
        *more,
    ]
    environment = engine_environment(1)
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # the engine has a process of its own
    return Server(
        name="vLLM's own server",
        command=command,
        port=port,
        log=folder / "own.log",
        environment=environment,
        cores=cores,
    )


def _title(process: psutil.Process) -> str:
    """The name of the part of a side that a process is, from its log file or its process name."""
    with contextlib.suppress(OSError):
        output = Path(f"/proc/{process.pid}/fd/1").readlink().stem
        return output if output.endswith(("rank0", "rank1")) else process.name()
    return process.name()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
