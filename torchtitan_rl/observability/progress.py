"""What the console shows during a run: a live display on a terminal, plain lines elsewhere.

`ProgressState` is the pure model; the renderers only show it.

How a run went: the paragraph at its end.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Literal, Protocol, TextIO

from torchtitan_rl.observability.asynchrony import Overlap
from torchtitan_rl.observability.jsonl import read_rows
from torchtitan_rl.orchestration.records import BufferStates

STEP_WORDS = """\
The line of a step on the console:
  [1:20]        time since this process began
  step 9/50     steps done, of the whole run
  reward 0.610  mean reward of the step's rollouts
  2 failed      rollouts of the step without a reward, which are not trained on
  val 0.580     mean reward of the newest evaluation
  1,840 tok/s   sampled tokens of the step's rollouts per second of the whole step
  age 1.2       how many versions the weights were ahead when a token was trained on, on average
  ready 9/24    groups rolled out that wait for a batch / groups that may be under way at once
  idle 74%+40%  share of the step in which the trainer / the replicas had nothing to do
  ETA 3:10      time left, by the median of the last 10 steps
age, ready and idle are of asynchronous runs (schedule.staleness 1 or more)."""
_ETA_STEPS = 10


class ProgressState:
    """The state of a run. Durations are in seconds; None is unknown yet."""

    def __init__(
        self, num_steps: int, *, step: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.num_steps = num_steps
        self.first_step = self.step = step  # that this process starts from
        self.phase = "start"
        self.reward: float | None = None
        self.num_failed = 0  # rollouts of the last step
        self.evaluation_step = 0
        self.evaluation_reward: float | None = None
        self.tokens_per_second: float | None = None
        self.staleness: float | None = None
        self.buffer: BufferStates | None = None
        self.overlap: Overlap | None = None
        self._clock = clock
        self._started = self._last_step_end = clock()
        self._durations: deque[float] = deque(maxlen=_ETA_STEPS)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started

    @property
    def eta_s(self) -> float | None:
        """From the median of the last steps, evaluations and checkpoints between them included."""
        if not self._durations:
            return None
        in_this_step = self._clock() - self._last_step_end
        rest = (self.num_steps - self.step) * median(self._durations) - in_this_step
        return max(0.0, rest)

    def start_steps(self) -> None:
        """The first step begins: what came before (start-up) is not counted in the estimate."""
        self._last_step_end = self._clock()

    def end_step(
        self,
        step: int,
        *,
        reward: float | None,
        tokens_per_second: float | None,
        staleness: float | None = None,
        buffer: BufferStates | None = None,
        overlap: Overlap | None = None,
        num_failed: int = 0,
    ) -> None:
        """``staleness``, ``buffer`` and ``overlap`` are shown where given; a synchronous run has no
        need of them."""
        now = self._clock()
        self._durations.append(now - self._last_step_end)
        self._last_step_end = now
        self.step = step
        self.reward = reward
        self.tokens_per_second = tokens_per_second
        self.staleness = staleness
        self.buffer = buffer
        self.overlap = overlap
        self.num_failed = num_failed

    def end_evaluation(self, step: int, reward: float | None) -> None:
        self.evaluation_step, self.evaluation_reward = step, reward


class Progress(Protocol):
    """Shows a `ProgressState`."""

    def update(self, line: str = "") -> None:
        """The state changed; ``line`` says what, where it is shown line by line."""
        ...

    def say(self, message: str) -> None:
        """Show a message that stays."""
        ...

    def close(self) -> None: ...


class LineProgress:
    """One line for each step, evaluation and message; without a ``state``, messages only."""

    def __init__(self, stream: TextIO, state: ProgressState | None = None) -> None:
        self._stream = stream
        self._state = state

    def update(self, line: str = "") -> None:
        if line and self._state is not None:
            self.say(line)

    def say(self, message: str) -> None:
        time = "" if self._state is None else f"[{format_seconds(self._state.elapsed_s)}] "
        with suppress(OSError):  # on a full disk the line may be lost, and the run goes on
            print(f"{time}{message}", file=self._stream, flush=True)

    def close(self) -> None: ...


class RichProgress:
    """A live line at the bottom of the terminal; messages scroll above it."""

    def __init__(self, state: ProgressState, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
        from rich.table import Column

        self._state = state
        spinner, facts = SpinnerColumn(), TextColumn("{task.fields[facts]}")
        phase = TextColumn(
            "{task.fields[phase]}", style="cyan", table_column=Column(min_width=10, no_wrap=True)
        )
        self._columns_without_bar = (spinner, phase, facts)
        self._bar = Progress(
            spinner,
            phase,
            BarColumn(bar_width=24),
            facts,
            console=Console(file=stream),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task(
            "run", total=state.num_steps, completed=state.step, phase=state.phase, facts=""
        )
        self._bar.start()

    def update(self, line: str = "") -> None:
        state = self._state
        if state.overlap is not None:  # its facts need the room
            self._bar.columns = self._columns_without_bar
        self._bar.update(
            self._task, completed=state.step, phase=state.phase, facts=describe_step(state)
        )

    def say(self, message: str) -> None:
        self._bar.console.print(message, markup=False, highlight=False)

    def close(self) -> None:
        self.update()
        self._bar.stop()


def make_progress(
    choice: Literal["auto", "rich", "plain", "none"],
    state: ProgressState,
    stream: TextIO | None = None,
) -> Progress:
    """The renderer of the configuration's choice; ``auto`` is rich on a terminal, else plain."""
    stream = stream or sys.stdout
    if choice == "none":
        return LineProgress(sys.stderr)
    if choice == "rich" or (choice == "auto" and stream.isatty()):
        return RichProgress(state, stream)
    return LineProgress(stream, state)


def describe_step(state: ProgressState) -> str:
    """``step 12/50  reward 0.610  val 0.580  1,840 tok/s  ETA 3:10``

    Where rollouts of the step failed it says ``2 failed`` after the reward.
    An asynchronous run shows before the ETA ``age 1.2  ready 7/33  idle 12%+3%``: the mean
    staleness, the finished groups of the buffer's room, and the idle shares of trainer and
    generator.
    """
    parts = [f"step {state.step}/{state.num_steps}"]
    if state.reward is not None:
        parts.append(f"reward {_number(state.reward)}")
    if state.num_failed:
        parts.append(f"{state.num_failed} failed")
    if state.evaluation_reward is not None:
        parts.append(f"val {_number(state.evaluation_reward)}")
    if state.tokens_per_second is not None:
        parts.append(f"{state.tokens_per_second:,.0f} tok/s")
    if state.staleness is not None:
        parts.append(f"age {state.staleness:.1f}")
    if state.buffer is not None:
        parts.append(f"ready {state.buffer.finished}/{state.buffer.capacity}")
    if state.overlap is not None:
        trainer, generator = state.overlap.trainer_idle_share, state.overlap.generator_idle_share
        parts.append(f"idle {trainer:.0%}+{generator:.0%}")
    if state.eta_s is not None:
        parts.append(f"ETA {format_seconds(state.eta_s)}")
    return "  ".join(parts)


def describe_evaluation(state: ProgressState) -> str:
    reward = _number(state.evaluation_reward)
    return f"evaluation after step {state.evaluation_step}: reward {reward}"


def format_seconds(seconds: float) -> str:
    """``3:05`` or ``1:02:05``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


_REWARD = "evaluation/reward_mean"
_IN_TURN = {
    "start": "start",
    "restore": "restoring",
    "rollout": "waiting for rollouts",
    "train": "training",
    "publish": "publishing weights",
    "switch": "switching devices",
    "checkpoint": "checkpoints",
    "export": "export",
}
_ALONGSIDE = {"evaluation": "evaluation", "sync": "weight syncs"}
_USUAL_STEPS = 10
_MIN_S = 0.5  # shorter phases are left out


def describe_run(
    run_dir: Path,
    *,
    headline: str,
    warnings: Sequence[str],
    seconds: Mapping[str, float],
    outputs: Mapping[str, Path],
    next_commands: Sequence[str],
) -> list[str]:
    """``seconds`` are by phase. Of the outputs those that exist are named."""
    lines = [headline, *warnings]
    if rewards := _evaluations(run_dir):
        lines.append(f"evaluation: {rewards}")
    if times := _times(seconds):
        lines.append(f"time: {times}")
    lines += [f"{name}: {path}" for name, path in outputs.items() if path.exists()]
    return [*lines, *(f"next: {command}" for command in next_commands)]


def usual_step_s(run_dir: Path) -> float | None:
    """Seconds of the run's last steps, their median; None before the first one."""
    steps: deque[float] = deque(maxlen=_USUAL_STEPS)
    with suppress(OSError, ValueError):
        for _, row in read_rows(run_dir / "metrics.jsonl"):
            if (step_s := row.get("time/step_s")) is not None:
                steps.append(step_s)
    return median(steps) if steps else None


def _evaluations(run_dir: Path) -> str:
    """Of the first and the last one of the whole run, earlier lives included."""
    found: dict[int, float] = {}
    with suppress(OSError, ValueError):
        for _, row in read_rows(run_dir / "metrics.jsonl"):
            if row.get(_REWARD) is not None:
                found[row["step"]] = row[_REWARD]
    steps = sorted(found)
    return ", then ".join(
        f"reward {found[step]:.3f} {f'after step {step}' if step else 'before the first step'}"
        for step in dict.fromkeys((steps[0], steps[-1]) if steps else ())
    )


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
