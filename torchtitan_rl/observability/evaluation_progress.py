"""What the console shows during an evaluation: a live line on a terminal, elsewhere a line for each
tenth of its rollouts.

A picture of an evaluation's results; needs matplotlib (the extra ``plots``).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TextIO

from torchtitan_rl.observability.progress import format_seconds
from torchtitan_rl.types import Rollout

_LINES = 10


class EvaluationState:
    """Counts rollouts: ``kept`` of the ``total`` were finished before."""

    def __init__(
        self, total: int, *, kept: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total = total
        self.done = kept
        self._clock = clock
        self._new = 0
        self._tokens = 0
        self._rewards: list[float] = []
        self._running_s = 0.0
        self._began: float | None = None
        self.what = "start"

    def begin(self, what: str) -> None:
        """Rollouts of ``what`` run now."""
        self.what, self._began, self._rewards = what, self._clock(), []

    def pause(self, what: str) -> None:
        """None runs; this time does not count in the estimate."""
        self._running_s, self.what, self._began = self._elapsed_s(), what, None

    def end_rollout(self, rollout: Rollout) -> None:
        self.done += 1
        self._new += 1
        self._tokens += rollout.num_sampled_tokens
        if rollout.reward is not None:
            self._rewards.append(rollout.reward)

    @property
    def eta_s(self) -> float | None:
        """From the mean time of the rollouts so far, each kind alike."""
        if not self._new:
            return None
        return self._elapsed_s() * (self.total - self.done) / self._new

    def describe(self) -> str:
        """``rollouts 128/512  reward 0.610  1,840 tok/s  ETA 3:10``"""
        parts = [f"rollouts {self.done}/{self.total}"]
        if self._rewards:
            parts.append(f"reward {sum(self._rewards) / len(self._rewards):.3f}")
        if self._tokens and (elapsed_s := self._elapsed_s()) > 0:
            parts.append(f"{self._tokens / elapsed_s:,.0f} tok/s")
        if (eta_s := self.eta_s) is not None:
            parts.append(f"ETA {format_seconds(eta_s)}")
        return "  ".join(parts)

    def _elapsed_s(self) -> float:
        return self._running_s + (0.0 if self._began is None else self._clock() - self._began)


class EvaluationProgress:
    """Shows the state; call `update` whenever it changed."""

    def __init__(
        self,
        state: EvaluationState,
        choice: Literal["auto", "rich", "plain", "none"],
        stream: TextIO | None = None,
    ) -> None:
        self._state = state
        self._stream = stream or sys.stdout
        self._is_silent = choice == "none"
        self._shown = self._tenths()
        self._bar: Any = None
        if choice == "rich" or (choice == "auto" and self._stream.isatty()):
            self._bar = _bar(state, self._stream)

    def update(self) -> None:
        state = self._state
        if self._bar is not None:
            self._bar.update(0, completed=state.done, what=state.what, facts=state.describe())
        elif self._tenths() > self._shown:
            self._shown = self._tenths()
            self.say(f"{state.what}: {state.describe()}")

    def say(self, message: str) -> None:
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False)
        elif not self._is_silent:
            print(message, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _tenths(self) -> int:
        return _LINES * self._state.done // max(1, self._state.total)


def _bar(state: EvaluationState, stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.fields[what]}", style="cyan"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[facts]}"),
        console=Console(file=stream),
        refresh_per_second=4,
    )
    bar.add_task("eval", total=state.total, completed=state.done, what=state.what, facts="")
    bar.start()
    return bar


MISSING = "no picture: matplotlib is not installed; pip install 'torchtitan-rl[plots]'"


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the picture of `results`: rewards side by side and, for several samples of a problem,
    pass@k.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.figure import Figure

    has_curves = any(len(row["pass_at_k"]) > 1 for row in rows)
    figure = Figure(figsize=(10 if has_curves else 6, 4), layout="constrained")
    axes = figure.subplots(1, 2 if has_curves else 1, squeeze=False)[0]
    names = list(dict.fromkeys(row["model"] for row in rows))
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    for number, temperature in enumerate(temperatures):
        shift = (number - (len(temperatures) - 1) / 2) * 0.15
        own = [row for row in rows if row["temperature"] == temperature and row["reward"]]
        places = [names.index(row["model"]) + shift for row in own]
        _intervals(axes[0], places, [row["reward"] for row in own], f"temperature {temperature:g}")
    axes[0].set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes[0].set_ylabel("mean reward, 95 % interval")
    axes[0].legend()
    if has_curves:
        for row in rows:
            ks = [int(k) for k in row["pass_at_k"]]
            label = f"{row['model']}, temperature {row['temperature']:g}"
            _intervals(axes[1], ks, list(row["pass_at_k"].values()), label, line="-")
        all_ks = sorted({int(k) for row in rows for k in row["pass_at_k"]})
        axes[1].set_xscale("log", base=2)
        axes[1].set_xticks(all_ks, map(str, all_ks))
        axes[1].set_xlabel("k")
        axes[1].set_ylabel("pass@k")
        axes[1].legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _intervals(
    axis: Any,
    places: Sequence[float],
    values: Sequence[Mapping[str, float]],
    label: str,
    *,
    line: str = "",
) -> None:
    means = [value["mean"] for value in values]
    low = [value["mean"] - value.get("ci95_low", value["mean"]) for value in values]
    high = [value.get("ci95_high", value["mean"]) - value["mean"] for value in values]
    axis.errorbar(places, means, yerr=[low, high], fmt=f"o{line}", capsize=3, label=label)
