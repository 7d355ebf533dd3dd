"""Pictures of the benchmarks' results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def figure(
    path: Path, *, size: tuple[float, float], columns: int = 1, shares_y: bool = False
) -> Iterator[Any]:
    """Yield axes to draw on, side by side if there are several ``columns``. The file is written
    when the block ends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, columns, figsize=size, sharey=shares_y)
    yield axes
    drawn.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path, dpi=120)
    pyplot.close(drawn)


def bars(path: Path, values: Mapping[str, float], *, title: str, label: str) -> None:
    """Draw a horizontal bar for each name, with its value."""
    names = list(values)
    with figure(path, size=(7, 0.6 + 0.5 * len(values))) as axes:
        drawn = axes.barh(names, [values[name] for name in names], color="#4477aa")
        axes.bar_label(drawn, fmt="{:,.4g}", padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel(label)
        axes.set_title(title, fontsize=10)
