"""Starting whole runs from the command line, and finding every process that they started."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch
from safetensors import safe_open

from torchtitan_rl.commands import cli
from torchtitan_rl.observability.sinks import read_rows

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs" / "alphabet_sort_tiny.py"
TIMEOUT_S = 900.0  # of a run or scenario that takes a minute on a quiet machine

# The embedded job, made small: 4 groups of 4 rollouts a step.
SMALL = (
    "--rollout.groups-per-step", "4",
    "--rollout.group-size", "4",
    "--evaluation.num-problems", "4",
    "--evaluation.every", "0",
    "--metrics.progress", "plain",
)  # fmt: skip

# The result does not depend on the number of replicas.
ONE_REPLICA = ("--generator.replicas", "1")


def options(root: Path, name: str, *more: str) -> list[str]:
    """The small run ``name`` under ``root``, with what ``more`` says."""
    return [str(TINY), *SMALL, "--output-dir", str(root), "--name", name, *more]


def processes_of(tag: str) -> list[psutil.Process]:
    """The processes that are alive and have this tag in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_tagged = process.environ().get("TORCHTITAN_RL_TEST") == tag
            if is_tagged and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Run:
    """``torchtitan-rl train``, or another command, in a process of its own; all its descendants
    carry a tag. ``output``: where stdout goes, else into the log, too."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        log: Path,
        module: str = "cli",
        command: str = "train",
        output: Path | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._tag = f"{uuid.uuid4()}"
        self.log = log
        words = [sys.executable, "-m", f"torchtitan_rl.commands.{module}"]
        if module == "torchrun":
            words[1:2] = ["-m", "torch.distributed.run", "--nproc-per-node=1", "-m"]
        else:
            words.append(command)
        with log.open("w") as errors, (output or Path(os.devnull)).open("w") as said:
            self.process = subprocess.Popen(
                [*words, *arguments],
                cwd=ROOT,
                env={**os.environ, **environment, "TORCHTITAN_RL_TEST": self._tag},
                stdout=errors if output is None else said,
                stderr=errors,
            )

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill_all()
            raise

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Poll for something that the run does."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill_all()
                raise AssertionError(f"never came: {what}\n{self.log.read_text()[-3000:]}")
            time.sleep(0.1)

    def require_success(self) -> None:
        assert self.wait() == 0, self.log.read_text()[-3000:]
        assert self.left_behind() == []

    def processes(self) -> list[psutil.Process]:
        """Those of the run that are alive, wherever they were re-parented."""
        return processes_of(self._tag)

    def listening_on(self) -> set[str]:
        """The IP addresses on which its processes accept connections; not those of torchrun."""
        found = set()
        for process in self.processes():
            if "torch.distributed.run" not in process.cmdline():
                sockets = process.net_connections("inet")
                found |= {one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN}
        return found

    def process_of(self, rank: str) -> psutil.Process:
        """The process of ``rank`` (such as "trainer-rank0"), not a helper that it started: ours
        lead a process group."""
        for process in self.processes():
            leads = os.getpgid(process.pid) == process.pid
            if leads and printing_to(process) == f"{rank}.log":
                return process
        raise LookupError(f"no process of the run prints to {rank}.log")

    def left_behind(self, grace_s: float = 60.0) -> list[str]:
        """Command lines of processes that are still alive after ``grace_s``."""
        deadline = time.monotonic() + grace_s
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        return [" ".join(process.cmdline()) for process in self.processes()]

    def kill_all(self) -> None:
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


def train(root: Path, name: str, *more: str) -> Path:
    """The directory of a small run that ended well and left no process behind."""
    Run(options(root, name, *more), log=root / f"{name}.log").require_success()
    return root / name


def run_module(
    module: str, *arguments: str, ranks: int = 1, code: int = 0, **environment: str
) -> str:
    """What ``python -m module`` prints before it ends with ``code``; several ``ranks`` are started
    by torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [sys.executable, *(torchrun if ranks > 1 else []), "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def play(scenario: str, *arguments: object) -> Any:
    """What a module of this folder prints, as JSON in its last line."""
    printed = run_module(f"tests.real.{scenario}", *map(str, arguments))
    return json.loads(printed.splitlines()[-1])


def printing_to(process: psutil.Process) -> str:
    """Name of the log file of a process, which names its rank; "" when it is gone."""
    try:
        return Path(f"/proc/{process.pid}/fd/1").readlink().name
    except OSError:
        return ""


def require_audit(run_dir: Path) -> None:
    """Everything that the run wrote adds up; run by hand, it says what does not."""
    assert cli.main(["audit", str(run_dir)]) == 0, f"torchtitan-rl audit {run_dir}"


def weights(run_dir: Path) -> dict[str, str]:
    """The exported policy: a digest of each tensor, so that a difference says where it is."""
    with safe_open(run_dir / "policy" / "model.safetensors", "pt") as policy:
        tensors = {name: policy.get_tensor(name) for name in policy.keys()}  # noqa: SIM118
    return {
        name: hashlib.sha256(tensor.view(torch.uint8).numpy().data).hexdigest()
        for name, tensor in tensors.items()
    }


def digests(run_dir: Path) -> list[float]:
    """A digest of the trainer's weights after each step."""
    name = "trainer/weights_digest"
    return [row[name] for row in read_metrics(run_dir) if name in row]


def read_rollouts(run_dir: Path) -> list[dict[str, Any]]:
    return [line.row for line in read_rows(run_dir / "rollouts.jsonl")]


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All that is recorded of each step, its evaluation and its account included."""
    by_step: dict[int, dict[str, Any]] = {}
    for line in read_rows(run_dir / "metrics.jsonl"):
        by_step[line.row["step"]] = by_step.get(line.row["step"], {}) | line.row
    return [by_step[step] for step in sorted(by_step)]
