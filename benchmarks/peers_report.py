"""The report on the runs of `benchmarks.peers`: tokens per second, ratios, table, JSON, picture.

A ratio says how many times as fast a side is as TRL. It is the median of the repeats' ratios. If
answers end by sampling, two sides do not generate the same number of tokens. So there are three
ratios: steps per second, processed tokens (prompts and answers) per second, and generated tokens
per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers_work import Workload
from benchmarks.plots import bars
from benchmarks.report import print_table, write_report

FIRST, LAST = 2, 2  # steps at either end of a run that are not measured
SAME_WORK = 0.02  # sides do the same work if processed tokens per step differ by at most this
UNITS = ("steps", "processed", "generated")


@dataclass(frozen=True, slots=True, kw_only=True)
class SideRun:
    """One run of a side. For each step: its duration, the time that the trainer waited for answers,
    and the number of tokens generated for the step. ``command_s`` is the duration of the whole
    command."""

    seconds: Sequence[float]
    rollout_s: Sequence[float]
    generated: Sequence[int]
    command_s: float
    packages: Mapping[str, str]

    @property
    def outside_s(self) -> float:
        """The seconds of the command that are outside of its steps: the start and the end."""
        return self.command_s - sum(self.seconds)

    @property
    def steady_s(self) -> float:
        """The mean seconds of a measured step."""
        return _steady_mean(self.seconds)

    def per_step(self, workload: Workload) -> dict[str, float]:
        """The mean amount of work in a measured step, in each unit."""
        generated = _steady_mean(self.generated)
        prompts = workload.answers * workload.prompt_tokens
        return {"steps": 1.0, "processed": prompts + generated, "generated": generated}

    def per_second(self, workload: Workload) -> dict[str, float]:
        return {unit: amount / self.steady_s for unit, amount in self.per_step(workload).items()}


def _steady_mean(values: Sequence[float]) -> float:
    """
    Raises:
        SystemExit: the run is too short.
    """
    steady = values[FIRST : len(values) - LAST]
    if not steady:
        raise SystemExit(f"a run has {len(values)} steps: give it more than {FIRST + LAST}")
    return sum(steady) / len(steady)


def figures(
    runs: Mapping[str, Sequence[SideRun]], workload: Workload, *, base: str
) -> dict[str, Any]:
    """Return the figures of one workload: medians of each side, and the ratios of the other sides
    to ``base``.

    Raises:
        SystemExit: answers do not have their fixed lengths.
    """
    sides = {
        side: {
            "s_per_step": median(run.steady_s for run in of_side),
            "rollout_s": median(_steady_mean(run.rollout_s) for run in of_side),
            "outside_s": median(run.outside_s for run in of_side),
            "per_step": _medians([run.per_step(workload) for run in of_side]),
            "per_second": _medians([run.per_second(workload) for run in of_side]),
        }
        for side, of_side in runs.items()
    }
    if workload.median:
        for side, of_side in runs.items():
            _require_lengths(side, of_side, workload)
    ratios = {
        side: _medians(
            [
                _divided(run.per_second(workload), theirs.per_second(workload))
                for run, theirs in zip(of_side, runs[base], strict=True)
            ]
        )
        for side, of_side in runs.items()
        if side != base
    }
    differences = {
        side: _divided(sides[side]["per_step"], sides[base]["per_step"])["processed"] - 1
        for side in ratios
    }
    return {
        "sides": sides,
        "ratios": ratios,
        "difference_of_work": differences,
        "is_same_work": all(abs(share) <= SAME_WORK for share in differences.values()),
        "repeats": {
            side: [
                {
                    "seconds": list(run.seconds),
                    "rollout_s": list(run.rollout_s),
                    "generated": list(run.generated),
                    "command_s": run.command_s,
                }
                for run in of_side
            ]
            for side, of_side in runs.items()
        },
    }


def report(
    runs: Mapping[str, Mapping[str, Sequence[SideRun]]],
    workloads: Mapping[str, Workload],
    about: Mapping[str, Any],
    path: Path,
    *,
    base: str,
) -> None:
    """Print the tables, and write ``about`` and all figures to ``path`` with a picture."""
    results = {
        name: figures(of_workload, workloads[name], base=base) for name, of_workload in runs.items()
    }
    for name, result in results.items():
        _print(name, result, base=base)
    times = {
        f"{name}: {side}": ratios["steps"]
        for name, result in results.items()
        for side, ratios in result["ratios"].items()
    }
    bars(
        path.with_suffix(".png"),
        times,
        title=f"Optimizer steps of whole runs, as a multiple of {base}'s",
        label=f"steps per second over {base}'s, median",
    )
    packages = next(iter(runs.values()))[base][0].packages
    write_report(path, {**about, f"{base}_packages": packages, "workloads": results})


def _print(name: str, result: Mapping[str, Any], *, base: str) -> None:
    differences = result["difference_of_work"].values()
    print(
        f"\n{name}: processed tokens per step differ by at most "
        f"{max(map(abs, differences)):.1%} from {base}'s"
    )
    rows = []
    for side, row in result["sides"].items():
        ratios = result["ratios"].get(side)
        rows.append(
            [
                side,
                f"{row['s_per_step']:.2f}",
                f"{row['rollout_s']:.2f}",
                f"{row['outside_s']:.0f}",
                *(f"{row['per_second'][unit]:,.0f}" for unit in UNITS[1:]),
                *(f"{ratios[unit]:.2f}x" if ratios else "" for unit in UNITS),
            ]
        )
    header = ["side", "s/step", "waiting for answers", "start and end s"]
    header += [f"{unit} tokens/s" for unit in UNITS[1:]]
    print_table([*header, *(f"{unit}, ratio" for unit in UNITS)], rows)


def _require_lengths(side: str, runs: Sequence[SideRun], workload: Workload) -> None:
    for run in runs:
        for step, generated in enumerate(run.generated):
            drawn = sum(workload.step_lengths(step))
            if generated != drawn:
                raise SystemExit(
                    f"{side}: step {step} has {generated} generated tokens instead of {drawn}"
                )


def _divided(upper: Mapping[str, float], lower: Mapping[str, float]) -> dict[str, float]:
    return {unit: upper[unit] / lower[unit] for unit in UNITS}


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {unit: median(row[unit] for row in rows) for unit in UNITS}
