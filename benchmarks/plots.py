"""Pictures of the benchmarks' results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def bars(path: Path, values: Mapping[str, float], *, title: str, label: str) -> None:
    """One horizontal bar for each name, with its value."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.5 * len(values)))
    names = list(values)
    drawn = axes.barh(names, [values[name] for name in names], color="#4477aa")
    axes.bar_label(drawn, fmt="{:,.4g}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
