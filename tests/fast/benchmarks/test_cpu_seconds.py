"""CPU seconds of a run's processes, read while it runs."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.cpu_seconds import CpuSeconds, per_step

# Works for a tenth of a CPU second before each step, and starts one process with a log of its own.
RUN = """
import json, subprocess, sys, time
child = "import time\\nwhile time.process_time() < 0.3: pass\\ninput()"
with open(sys.argv[1] + "/trainer-rank0.log", "w") as log:
    other = subprocess.Popen([sys.executable, "-c", child], stdout=log, stdin=subprocess.PIPE)
for step in (1, 2):
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    with open(sys.argv[1] + "/metrics.jsonl", "a") as metrics:
        metrics.write(json.dumps({"kind": "step", "step": step}) + "\\n")
    print(step, flush=True)
    input()
other.communicate(b"\\n")
"""


def test_each_process_is_read_after_each_step(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        cpu = CpuSeconds(run.pid, tmp_path / "metrics.jsonl")
        cpu.look()
        assert cpu.after == {}
        for step in (1, 2):
            assert run.stdout.readline() == f"{step}\n".encode()
            cpu.look()
            cpu.look()  # nothing has changed
            run.stdin.write(b"\n")
            run.stdin.flush()
    assert list(cpu.after) == [1, 2]
    assert {*cpu.after[1]} == {*cpu.after[2]} == {"controller", "trainer-rank0"}
    spent = per_step(cpu.after, 2, 2)
    assert spent["controller"] > 0.0
    assert spent["trainer-rank0"] >= 0.0
