"""A picture of an evaluation's results; needs matplotlib (the extra ``plots``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
