"""Console output: a live line on a terminal, plain lines elsewhere, and a summary at the end.

`ProgressState` and `EvaluationState` hold the state of a run and of an evaluation, and describe it
in a line of text; `Console` shows this line.
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, TextIO

from torchtitan_rl.observability.engine import Overlap
from torchtitan_rl.observability.sinks import RowKind, read_rows
from torchtitan_rl.orchestration.records import BufferStates
from torchtitan_rl.orchestration.watchdog import activities_to_json
from torchtitan_rl.rollout.run import RolloutActivity
from torchtitan_rl.types import Rollout

Choice = Literal["auto", "rich", "plain", "none"]

STEP_LINE = "The line of a step on the console:"
STEP_WORDS = f"""\
{STEP_LINE}
  [1:20]        time since this process began
  step 9/50     steps done / steps of the whole run
  reward 0.610  mean reward of the step's rollouts
  2 failed      rollouts of the step without a reward, which are not trained on
  val 0.580     mean reward of the newest evaluation
  1,840 tok/s   sampled tokens of the step's rollouts per second of the whole step
  age 1.2       mean age of the trained tokens: the trainer's version minus the sampling one
  ready 9/24    finished groups that wait for a batch / capacity of the buffer in groups
  idle 74%+40%  share of the step in which the trainer / the replicas had nothing to do
  ETA 3:10      time left, by the median of the last 10 steps
age, ready and idle are of asynchronous runs (schedule.staleness 1 or more)."""
SUPERVISED_WORDS = f"""\
{STEP_LINE}
  [0:20]       time since this process began
  step 9/50    steps done / steps of the whole run
  loss 0.4310  loss of the step, before its update
  val 0.449    loss of the newest evaluation
  1,840 tok/s  tokens with loss per second of the whole step
  ETA 3:10     time left, by the median of the last 10 steps"""
_MEDIAN_STEPS = 10
_NUM_COLUMNS = 4  # columns of the live line: spinner, phase, bar, facts
_MAX_FACTS_WITH_BAR = 70


class ProgressState:
    """The state of a run. Durations are in seconds; None means not yet known."""

    def __init__(
        self, num_steps: int, *, step: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_steps = num_steps
        self.first_step = self.step = step  # the step after which this process starts
        self.phase = "start"
        self.evaluation: float | None = None  # the newest reward; of a supervised run, the loss
        self._metrics: Mapping[str, float] = {}  # metrics of the last step
        self._num_failed = 0
        self._buffer: BufferStates | None = None
        self._overlap: Overlap | None = None
        self._clock = clock
        self._started = self._last_step_end = clock()
        self._durations: deque[float] = deque(maxlen=_MEDIAN_STEPS)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started

    @property
    def eta_s(self) -> float | None:
        """Remaining time, from the median time between the ends of the last steps."""
        if not self._durations:
            return None
        in_this_step = self._clock() - self._last_step_end
        rest = (self.num_steps - self.step) * median(self._durations) - in_this_step
        return max(0.0, rest)

    def start_steps(self) -> None:
        """Begin the first step. The start-up before it does not count in the estimate."""
        self._last_step_end = self._clock()

    def end_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        num_failed: int = 0,
        buffer: BufferStates | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        """Record a step with its metrics; ``num_failed`` of its rollouts have no reward. The line
        of a synchronous run, without ``buffer`` and ``overlap``, does not show the age of tokens.
        """
        now = self._clock()
        self._durations.append(now - self._last_step_end)
        self._last_step_end = now
        self.step, self._metrics, self._num_failed = step, metrics, num_failed
        self._buffer, self._overlap = buffer, overlap

    def show_on(self, console: Console) -> None:
        """Change the live line."""
        console.update(self.step, self.phase, self.describe())

    def describe(self) -> str:
        """``step 12/50  reward 0.610  val 0.580  1,840 tok/s  ETA 3:10``; see `STEP_WORDS`."""
        metrics, buffer, overlap = self._metrics, self._buffer, self._overlap
        parts = [f"step {self.step}/{self.num_steps}"]
        if (reward := metrics.get("train/reward_mean")) is not None:
            parts.append(f"reward {reward:.3f}")
        elif "train/rollouts" in metrics and not metrics["train/rollouts"]:
            loss = metrics.get("trainer/loss", math.nan)
            parts.append(f"loss {loss:.4f}")
        if self._num_failed:
            parts.append(f"{self._num_failed} failed")
        if self.evaluation is not None:
            parts.append(f"val {self.evaluation:.3f}")
        if (rate := metrics.get("tokens/generated_per_second")) is not None:
            parts.append(f"{rate:,.0f} tok/s")
        if buffer is not None and (age := metrics.get("policy/staleness_mean")) is not None:
            parts.append(f"age {age:.1f}")
        if buffer is not None:
            parts.append(f"ready {buffer.finished}/{buffer.capacity}")
        if overlap is not None:
            idle = overlap.trainer_idle_share, overlap.generator_idle_share
            parts.append(f"idle {idle[0]:.0%}+{idle[1]:.0%}")
        if self.eta_s is not None:
            parts.append(f"ETA {format_seconds(self.eta_s)}")
        return "  ".join(parts)


class EvaluationState:
    """The state of an evaluation. ``kept`` of the ``total`` rollouts were finished by an earlier
    process."""

    def __init__(
        self, total: int, *, kept: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total = total
        self.done = self._shown = kept
        self.phase = "start"
        self._clock = clock
        self._new = 0
        self._tokens = 0
        self._rewards: list[float] = []
        self._running_s = 0.0
        self._began: float | None = None
        self.activities: Callable[[], Sequence[RolloutActivity]] = tuple

    def now(self) -> dict[str, Any]:
        """Describe what happens at this moment, as JSON types; called on the event loop."""
        now_s = asyncio.get_running_loop().time()
        return {
            "phase": self.phase,
            "step": self.done,
            "num_steps": self.total,
            "rollouts": activities_to_json(self.activities(), now_s),
        }

    def begin(self, phase: str) -> None:
        """Begin ``phase``, in which rollouts run."""
        self.phase, self._began, self._rewards = phase, self._clock(), []

    def pause(self, phase: str) -> None:
        """Begin ``phase``, in which no rollout runs. The estimate leaves out the time of this
        phase."""
        self._running_s, self.phase, self._began = self._elapsed_s(), phase, None

    def end_rollout(self, rollout: Rollout) -> None:
        self.done += 1
        self._new += 1
        self._tokens += rollout.num_sampled_tokens
        if rollout.reward is not None:
            self._rewards.append(rollout.reward)

    @property
    def eta_s(self) -> float | None:
        """Remaining time, from the mean time of all rollouts so far."""
        if not self._new:
            return None
        return self._elapsed_s() * (self.total - self.done) / self._new

    def describe(self) -> str:
        """``rollouts 128/512  reward 0.610  1,840 tok/s  ETA 3:10``"""
        parts = [f"rollouts {self.done}/{self.total}"]
        if self._rewards:
            parts.append(f"reward {fmean(self._rewards):.3f}")
        if self._tokens and (elapsed_s := self._elapsed_s()) > 0:
            parts.append(f"{self._tokens / elapsed_s:,.0f} tok/s")
        if (eta_s := self.eta_s) is not None:
            parts.append(f"ETA {format_seconds(eta_s)}")
        return "  ".join(parts)

    def show_on(self, console: Console) -> None:
        """Change the live line. Without a live line, print one for each tenth of the rollouts."""
        console.update(self.done, self.phase, self.describe())
        tenths = [10 * done // max(1, self.total) for done in (self._shown, self.done)]
        if tenths[0] < tenths[1]:
            self._shown = self.done
            console.line(f"{self.phase}: {self.describe()}")

    def _elapsed_s(self) -> float:
        return self._running_s + (0.0 if self._began is None else self._clock() - self._began)


class Console:
    """Shows messages and, on a terminal, a live line below them, whose bar goes from ``done`` to
    ``total``. ``stamp`` returns the beginning of a plain line. The ``choice`` ``auto`` is ``rich``
    on a terminal and ``plain`` elsewhere; ``none`` shows only messages, on stderr."""

    def __init__(
        self,
        choice: Choice,
        *,
        total: int,
        done: int = 0,
        stream: TextIO | None = None,
        stamp: Callable[[], str] = str,
    ) -> None:
        stream = stream or sys.stdout
        self._has_lines = choice != "none"
        self._stream = stream if self._has_lines else sys.stderr
        self._stamp = stamp if self._has_lines else str
        self._live: Any = None
        if choice == "rich" or (choice == "auto" and stream.isatty()):
            self._live = _live_line(stream, done, total)

    def update(self, done: int, phase: str, facts: str) -> None:
        """Change the live line. If ``facts`` is too long to fit next to the bar, the bar is
        removed."""
        if self._live is not None:
            if len(facts) > _MAX_FACTS_WITH_BAR and len(self._live.columns) == _NUM_COLUMNS:
                self._live.columns = (*self._live.columns[:2], self._live.columns[3])
            self._live.update(0, completed=done, phase=phase, facts=facts)

    def line(self, text: str) -> None:
        """Print a plain line, unless there is a live line, which already shows the same facts."""
        if self._live is None and self._has_lines:
            self.say(text)

    def say(self, message: str) -> None:
        """Show a message that stays."""
        if self._live is not None:
            self._live.console.print(message, markup=False, highlight=False)
        else:
            with suppress(OSError):  # on a full disk the line may be lost; the run continues
                print(f"{self._stamp()}{message}", file=self._stream, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _live_line(stream: TextIO, done: int, total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
    from rich.table import Column

    phase = TextColumn(
        "{task.fields[phase]}", style="cyan", table_column=Column(min_width=10, no_wrap=True)
    )
    live = Progress(
        SpinnerColumn(),
        phase,
        BarColumn(bar_width=24),
        TextColumn("{task.fields[facts]}"),
        console=Console(file=stream),
        refresh_per_second=4,
    )
    live.add_task("all", total=total, completed=done, phase="start", facts="")
    live.start()
    return live


def format_seconds(seconds: float) -> str:
    """``3:05`` or ``1:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_IN_TURN = {
    "start": "start",
    "restore": "restoring",
    "rollout": "waiting for rollouts",
    "rows": "waiting for rows",
    "reference": "reference logprobs",
    "train": "training",
    "publish": "publishing weights",
    "switch": "switching devices",
    "checkpoint": "checkpoints",
    "export": "export",
}
_ALONGSIDE = {"evaluation": "evaluation", "sync": "weight syncs"}
_MIN_S = 0.5  # shorter phases are left out
_FATES = {
    "trained": "trained",
    "masked": "left out of the loss",
    "discarded": "thrown away",
    "buffered": "of unfinished groups",
}
_MAX_CHARS = 140  # of a rollout's text


def describe_run(
    run_dir: Path,
    *,
    headline: str,
    warnings: Sequence[str],
    seconds: Mapping[str, float],
    totals: Mapping[str, float],
    examples: Sequence[Mapping[str, Any]],
    outputs: Mapping[str, Path],
    next_commands: Sequence[str],
) -> list[str]:
    """Describe how a run went. ``seconds``: the time of each phase. ``totals``: the metrics
    ``total/*`` of the last step. ``examples``: rows of ``rollouts.jsonl`` to show. ``outputs``:
    files and folders of the run; those that are absent or empty are not shown."""
    lines = [headline, *warnings]
    if rewards := _evaluations(run_dir):
        lines.append(f"evaluation: {rewards}")
    if times := _times(seconds):
        lines.append(f"time: {times}")
    if tokens := _tokens(totals):
        lines.append(f"tokens: {tokens}")
    lines += [line for row in examples for line in _example(row)]
    lines += [f"{name}: {path}" for name, path in outputs.items() if _is_used(path)]
    return [*lines, *(f"next: {command}" for command in next_commands)]


def _is_used(path: Path) -> bool:
    """Whether it exists and, if it is a file, is not empty, as the rollouts of fine-tuning are."""
    return path.is_dir() or (path.is_file() and path.stat().st_size > 0)


def usual_step_s(run_dir: Path) -> float | None:
    """The median time of the run's last steps, in seconds; None before the first step."""
    found = list(_values(run_dir, RowKind.STEP, "time/step_s").values())
    return median(found[-_MEDIAN_STEPS:]) if found else None


def _evaluations(run_dir: Path) -> str:
    """The rewards (of a supervised run, the losses) of the first and the last evaluation of the
    run, including evaluations before a resume."""
    names = {"reward": "evaluation/reward_mean", "loss": "evaluation/loss"}
    for what, name in names.items():
        if found := _values(run_dir, RowKind.EVALUATION, name):
            return ", then ".join(
                f"{what} {found[at]:.3f} {f'after step {at}' if at else 'before the first step'}"
                for at in sorted({min(found), max(found)})
            )
    return ""


def _values(run_dir: Path, kind: RowKind, name: str) -> dict[int, float]:
    """A metric by step, from rows of a kind; empty if the rows cannot be read."""
    found: dict[int, float] = {}
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        for line in read_rows(run_dir / "metrics.jsonl"):
            value = line.row.get(name)
            if line.row["kind"] == kind and value is not None and math.isfinite(value):
                found[int(line.row["step"])] = value
    return found


def _tokens(totals: Mapping[str, float]) -> str:
    """``12,000 sampled: 11,500 trained, 500 thrown away (restarted 500)``"""
    parts = []
    for fate, words in _FATES.items():
        prefix = f"total/tokens_{fate}"
        causes = [
            f"{name.removeprefix(prefix)[1:]} {number:,.0f}"
            for name, number in totals.items()
            if name.startswith(f"{prefix}/") and number
        ]
        if number := totals.get(prefix):
            why = f" ({', '.join(causes)})" if causes else ""
            parts.append(f"{number:,.0f} {words}{why}")
    sampled = totals.get("total/tokens_generated", 0.0)
    return f"{sampled:,.0f} sampled: {', '.join(parts)}" if parts else ""


def _example(row: Mapping[str, Any]) -> list[str]:
    """Three lines about a rollout. Its texts are shown as Python writes them, so that no character
    of a policy controls the terminal."""
    asked = [one.get("content") for one in row["messages"] if one.get("role") == "user"]
    said = row["turns"][-1]["text"] if row["turns"] else None
    texts = {"first message": asked[0] if asked else None, "last answer": said}
    reward = "no reward" if row["reward"] is None else f"reward {row['reward']:.3f}"
    return [
        f"{row['chosen']} rollout of step {row['step']}: {reward}, {row['status']}, "
        f"{row['rollout_id']!r}",
        *(f"  {name}: {_excerpt(text)}" for name, text in texts.items() if text),
    ]


def _excerpt(text: object) -> str:
    whole = str(text)
    return repr(whole) if len(whole) <= _MAX_CHARS else f"{whole[:_MAX_CHARS]!r} ..."


def _times(seconds: Mapping[str, float]) -> str:
    parts = [
        ", ".join(
            f"{label} {format_seconds(seconds[phase])}"
            for phase, label in labels.items()
            if seconds.get(phase, 0.0) >= _MIN_S
        )
        for labels in (_IN_TURN, _ALONGSIDE)
    ]
    return "; alongside: ".join(part for part in parts if part)
