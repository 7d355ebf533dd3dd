"""Engines whose steps wait, as those on a device do: the wait uses no core, so more replicas sample
more tokens, whatever the number of cores."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).parents[2]

# Found on PYTHONPATH by every process of a run.
_SITE = """
import sys, threading, time

def slow():
    name = "torchtitan_rl.backends.vllm.engine"
    while not hasattr(engine := sys.modules.get(name), "VllmEngine"):
        time.sleep(0.05)
    step = engine.VllmEngine.step

    def slow_step(self):
        time.sleep({seconds})
        return step(self)

    engine.VllmEngine.step = slow_step

threading.Thread(target=slow, daemon=True).start()
"""


def environment(folder: Path, seconds: float) -> dict[str, str]:
    """Environment variables with which each step of a run's engines waits. Writes to ``folder``."""
    (folder / "sitecustomize.py").write_text(_SITE.format(seconds=seconds))
    return {"PYTHONPATH": f"{folder}:{_ROOT}"}
