"""What each view of the page shows, as JSON: functions of a `RunIndex`."""

from __future__ import annotations

import math
import re
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

from torchtitan_rl.errors import CheckpointError, OutputError
from torchtitan_rl.observability.explain import (
    RunFacts,
    diagnose,
    finite,
    mean_overlap,
    speed_advice,
    summarize,
    times_of,
    verdict,
)
from torchtitan_rl.observability.failures import read_failures, summarize_failures
from torchtitan_rl.observability.page_files import LAUNCH_FILE
from torchtitan_rl.observability.sinks import METRIC_TABLE, RowKind, expand_names
from torchtitan_rl.page.index import Columns, RunIndex
from torchtitan_rl.page.rollouts import ParameterError, float_in
from torchtitan_rl.page.timeline import timeline
from torchtitan_rl.page.values import Json, clean, integer, plain
from torchtitan_rl.training.checkpoints import CheckpointDirectory

_RECENT_STEPS = 10
_FACT_STEPS = 2_000
_TURN_STEPS = 50
_MAX_WIDTH = 4_000
_ROW = re.compile(r"^\| `(.+?)` \| (.*?) \| (.*?) \| (.*) \|$")


@cache
def catalogue() -> list[Json]:
    """The rows of the metric table, one for each name."""
    section, found = "", []
    for line in METRIC_TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif match := _ROW.match(line):
            names, unit, reduction, meaning = match.groups()
            found += [
                {
                    "name": name,
                    "unit": unit,
                    "reduction": reduction,
                    "meaning": meaning.replace("\\|", "|"),
                    "section": section,
                }
                for name in expand_names(names)
            ]
    return found


def describe_run(number: int, index: RunIndex) -> Json:
    is_eval = index.kind == "eval"
    step = len(index.rollouts) if is_eval else _last_step(index.columns[RowKind.STEP])
    num_steps = index.now().get("num_steps") if is_eval else index.fields().get("num_steps")
    return {
        "run": number,
        "name": clean(index.folder.name),
        "dir": clean(str(index.folder)),
        "kind": index.kind,
        "is_live": index.is_live,
        "step": step,
        "num_steps": integer(num_steps),
    }


def overview(index: RunIndex) -> Json:
    columns, live = index.columns[RowKind.STEP], index.now()
    seconds = _recent(columns, "time/step_s")
    described = describe_run(0, index)
    begin_s = _begin_s(index)
    end_s = time.time() if live else max((one.wall_s[-1] for one in _filled(index)), default=None)
    key = index.counters["metrics"], index.is_read
    if index.described is None or index.described[0] != key:
        index.described = key, _describe_rows(index)
    return {
        **described,
        **index.described[1],
        "phase": plain(live.get("phase")),
        "num_rows": len(columns),
        "eta_s": _eta_s(columns, seconds, described["num_steps"]) if live else None,
        "elapsed_s": None if begin_s is None or end_s is None else max(0.0, end_s - begin_s),
        "seconds_per_step": seconds,
        "tokens_per_s": _recent(columns, "tokens/generated_per_second"),
        "warnings": _warnings(index),
        "next": _next_commands(index, described),
        "is_read": index.is_read,
    }


def _describe_rows(index: RunIndex) -> Json:
    columns = index.columns[RowKind.STEP]
    rows, fields = columns.rows(most=_FACT_STEPS), index.fields()
    facts = RunFacts(
        steps=rows,
        evaluations=index.columns[RowKind.EVALUATION].rows(most=_FACT_STEPS),
        fields=fields,
        token_s=index.rollouts.token_s(after_step=_last_step(columns) - _TURN_STEPS),
    )
    last: Json = rows[-1] if rows else {}
    overlap, cap = mean_overlap(rows), integer(fields.get("schedule.staleness"))
    rewards = [one["train/reward_mean"] for one in rows if "train/reward_mean" in one]
    third = max(1, len(rewards) // 3)  # as `explain` compares them
    ages = [one["policy/staleness_max"] for one in rows if "policy/staleness_max" in one]
    return {
        "version": last.get("policy/version"),
        "learns": verdict(facts),
        "reward": {"first": fmean(rewards[:third]), "last": fmean(rewards[-third:])}
        if rewards
        else None,
        "evaluations": _evaluations(index),
        "idle": None
        if overlap is None
        else {"trainer": overlap.trainer_idle_share, "generator": overlap.generator_idle_share},
        "shares_cores": facts.shares_cores,
        "advice": speed_advice(facts),
        "staleness": {
            "mean": last.get("policy/staleness_mean"),
            "max": max(ages, default=None),
            "cap": cap,
        },
        "failures": _endings(rows),
        "tokens": _tokens(last),
        "times": [{"name": name, "seconds": s} for name, s in times_of(rows).items() if s],
        "summary": _summary(index, facts),
        "found": [
            {"cause": one.cause.value, "what": one.what, "fix": one.fix} for one in diagnose(facts)
        ],
    }


def metrics(index: RunIndex, names: Sequence[str] | None) -> Json:
    """Without ``names``, the names that the run has; otherwise their series, and the x axes that
    the series of one kind of row share."""
    if names is None:
        return {"names": sorted({name for one in index.columns.values() for name in one.values})}
    begin_s = _begin_s(index) or 0.0
    steps = index.columns[RowKind.STEP]
    axes, series = {}, {}
    for name in names:
        for kind, columns in index.columns.items():
            if name in columns.values:
                axes[kind] = _axis(columns, steps, begin_s)
                series[name] = {"axis": kind, "value": _values(columns.values[name])}
                break
    return {"axes": axes, "series": series}


def show_timeline(index: RunIndex, parameters: Mapping[str, str]) -> Json:
    """Raises ParameterError."""
    if unknown := parameters.keys() - {"from", "to", "width"}:
        raise ParameterError(f"{min(unknown)}: no such parameter")
    begin, end = (
        float_in(name, parameters[name]) if name in parameters else None for name in ("from", "to")
    )
    width = float_in("width", parameters.get("width", "1000"))
    if not 1 <= width <= _MAX_WIDTH:
        raise ParameterError(f"width: give 1 to {_MAX_WIDTH}")
    columns = index.columns[RowKind.STEP]
    step_s = columns.values.get("time/step_s", [math.nan] * len(columns))
    steps = zip(columns.steps, columns.wall_s, step_s, strict=True)
    return timeline(index.trace, steps, begin=begin, end=end, width=int(width))


def now(index: RunIndex) -> Json:
    live = index.now()
    described = describe_run(0, index)
    empty: Json = {
        "at_unix_s": None,
        "phase": None,
        "waits": [],
        "chain": "",
        "rollouts": {"total": 0, "by_phase": {}, "shown": []},
        "replicas": [],
        "groups": None,
        "evaluation": None,
    }
    known = {name: plain(live[name]) for name in (*empty, "step", "num_steps") if name in live}
    return empty | {name: described[name] for name in ("is_live", "step", "num_steps")} | known


def configuration(index: RunIndex) -> Json:
    launch = index.document(LAUNCH_FILE)
    names = ("command", "resume_command", "versions", "machine", "plan", "telemetry")
    fields = {name: plain(value) for name, value in index.fields().items()}
    described = {name: plain(launch.get(name)) for name in names}
    return {"fields": fields, "resume_note": _resume_note(index)} | described


def _resume_note(index: RunIndex) -> str:
    num_steps = integer(index.fields().get("num_steps"))
    if num_steps is not None and _last_step(index.columns[RowKind.STEP]) >= num_steps:
        return f"All {num_steps} steps are done: add a larger --num-steps."
    try:
        steps = CheckpointDirectory(index.folder / "checkpoints").steps()
    except (CheckpointError, OSError):
        return "The checkpoints cannot be read."
    return f"It continues after step {steps[-1]}." if steps else "It begins at step 1."


def policy_dir(index: RunIndex) -> Path:
    """The folder of the run's tokenizer."""
    launched = index.document(LAUNCH_FILE).get("policy_dir")
    own = index.folder / "policy"
    if isinstance(launched, str) and not (own / "tokenizer.json").is_file():
        return Path(launched)
    return own


def _begin_s(index: RunIndex) -> float | None:
    """When the run began: when it was launched first, or else when its first row was written."""
    begun = finite(index.document(LAUNCH_FILE).get("begun_unix_s"))
    firsts = [one.wall_s[0] for one in _filled(index)]
    return min([*firsts, *([] if begun is None else [begun])], default=None)


def _filled(index: RunIndex) -> list[Columns]:
    return [one for one in index.columns.values() if len(one)]


def _last_step(columns: Columns) -> int:
    return columns.steps[-1] if columns.steps else 0


def _recent(columns: Columns, name: str) -> float | None:
    values = [v for v in columns.values.get(name, ())[-_RECENT_STEPS:] if math.isfinite(v)]
    return median(values) if values else None


def _eta_s(columns: Columns, step_s: float | None, num_steps: int | None) -> float | None:
    if step_s is None or num_steps is None:
        return None
    since_s = time.time() - columns.wall_s[-1]
    return max(0.0, (num_steps - columns.steps[-1]) * step_s - since_s)


def _evaluations(index: RunIndex) -> list[Json]:
    columns = index.columns[RowKind.EVALUATION]
    names = {
        "step": "step",
        "mean": "evaluation/reward_mean",
        "low": "evaluation/reward_ci95_low",
        "high": "evaluation/reward_ci95_high",
    }
    rows = map(columns.row, range(len(columns)))
    found = ({key: row.get(name) for key, name in names.items()} for row in rows)
    return [one for one in found if one["mean"] is not None]


def _endings(rows: Sequence[Json]) -> dict[str, int]:
    prefix = "train/ended_"
    counts: Counter[str] = Counter()
    for row in rows:
        ended = {name: value for name, value in row.items() if name.startswith(prefix)}
        counts.update({name.removeprefix(prefix): int(value) for name, value in ended.items()})
    return {status: count for status, count in counts.items() if count}


def _tokens(last: Mapping[str, Any]) -> Json:
    kinds = ("generated", "trained", "masked", "discarded", "buffered")
    counts: Json = {kind: last.get(f"total/tokens_{kind}") for kind in kinds}
    causes = {
        f"{kind}: {name.removeprefix(prefix)}": value
        for kind in ("masked", "discarded")
        for prefix in [f"total/tokens_{kind}/"]
        for name, value in last.items()
        if name.startswith(prefix) and value
    }
    return counts | {"causes": causes}


def _summary(index: RunIndex, facts: RunFacts) -> list[str]:
    if index.kind == "train":
        try:
            failures = summarize_failures(read_failures(index.folder))
        except OutputError as error:
            failures = [f"{error}"]
        return [*summarize(facts), *map(clean, failures)]
    results = index.document("results.json").get("results")
    lines = []
    for one in results if isinstance(results, list) else []:
        reward = one.get("reward") if isinstance(one, dict) else None
        if isinstance(reward, dict) and (mean := finite(reward.get("mean"))) is not None:
            low, high = (finite(reward.get(name)) for name in ("ci95_low", "ci95_high"))
            interval = "" if low is None or high is None else f" ({low:.3f} to {high:.3f})"
            model, heat = plain(one.get("model")), finite(one.get("temperature"))
            lines.append(f"{model}, temperature {heat}: reward {mean:.3f}{interval}")
    return lines or ["the evaluation has no results yet"]


def _warnings(index: RunIndex) -> list[str]:
    if not index.num_passed_over:
        return []
    more = index.num_passed_over - len(index.passed_over)
    lines = "; ".join(index.passed_over) + (f"; and {more} more" if more else "")
    return [f"{index.num_passed_over} lines cannot be read and are passed over: {lines}"]


def _next_commands(index: RunIndex, described: Json) -> list[str]:
    folder, step, num_steps = (described[name] for name in ("dir", "step", "num_steps"))
    commands: list[str] = []
    if described["is_live"] or described["kind"] != "train":
        return commands
    resume = index.document(LAUNCH_FILE).get("resume_command")
    if num_steps is not None and step < num_steps and isinstance(resume, str):
        commands.append(plain(resume))
    if (index.folder / "policy" / "config.json").is_file():
        commands.append(shlex.join(["torchtitan-rl", "serve", f"{folder}/policy"]))
    return [*commands, shlex.join(["torchtitan-rl", "audit", folder])]


def _axis(columns: Columns, steps: Columns, begin_s: float) -> Json:
    tokens = steps.values.get("total/tokens_generated")
    of_step = {} if tokens is None else dict(zip(steps.steps, tokens, strict=True))
    return {
        "step": list(columns.steps),
        "seconds": [None if s != s else round(s - begin_s, 3) for s in columns.wall_s],
        "tokens": _values(
            [of_step.get(step, 0.0 if not step else math.nan) for step in columns.steps]
        ),
    }


def _values(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
