"""The virtual clock of simulations, under the name that tests import."""

from __future__ import annotations

from torchtitan_rl.simulation.clock import VirtualLoop, run_virtually

__all__ = ["VirtualLoop", "run_virtually"]
