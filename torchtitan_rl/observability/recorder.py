"""The controller's `Recorder`: shows progress, and writes metrics, rollouts and the trace of a run.
Used in the controller's process, on its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torchtitan_rl.aio import background, first_of
from torchtitan_rl.config.lora import ADAPTER_FOLDER
from torchtitan_rl.config.machine import count
from torchtitan_rl.config.plan import ProcessPlan
from torchtitan_rl.config.run import RunConfig
from torchtitan_rl.errors import OutputError, RunTakenOverError
from torchtitan_rl.failures import Failure
from torchtitan_rl.observability.console import Console, ProgressState, describe_run, format_seconds
from torchtitan_rl.observability.engine import (
    EFFICIENCY,
    SHARES_CORES,
    Advisor,
    EngineSampler,
    LoopLagSampler,
    overlap_of,
)
from torchtitan_rl.observability.failures import FailureLog
from torchtitan_rl.observability.metrics import (
    account_metrics,
    cost_metrics,
    evaluation_metrics,
    fetch_metrics,
    held_out_metrics,
    step_metrics,
)
from torchtitan_rl.observability.page_files import NowFile
from torchtitan_rl.observability.rollouts import Decode, RolloutLog
from torchtitan_rl.observability.sinks import MetricsLog, RowKind, Split
from torchtitan_rl.observability.trace import Tracer, merge_traces
from torchtitan_rl.observability.trackers import start_trackers
from torchtitan_rl.orchestration.records import (
    AccountRecord,
    EvaluationRecord,
    HeldOutRecord,
    StepRecord,
)
from torchtitan_rl.rollout.calls import abandoned
from torchtitan_rl.rollout.rollouter import describe_failures, num_failed
from torchtitan_rl.serving.config import EndpointConfig
from torchtitan_rl.weights.distribution import Fetched

logger = logging.getLogger(__name__)

_MOST_DIFFERENCE = {
    "float32": ("trainer/age_0/logprob_diff_max", 1e-3),
    "bfloat16": ("trainer/age_0/logprob_diff_mean", 0.1),
}
"""For each dtype of the engines, a metric and its largest value that rounding can explain. Rounding
changes a token's logprob in float32 by 3e-5 (3e-4 with 135M weights), in bfloat16 by 0.04 on
average and by 0.3 for single tokens."""


class RunRecorder:
    """Writes into the run's directory while its ``async with`` is open.

    Each step's row has the metrics of ``engines``, and those that ``take_endpoint``,
    ``take_teachers`` and ``take_fetches`` return: of the time since the last step. What
    ``take_now`` returns (see `Controller.now`) is shown on the page. ``resume_step``: the step
    after which the run continues; None for a new run. ``identity``: the fields of the configuration
    by name, which trackers show.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: ProcessPlan,
        *,
        resume_step: int | None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        run_dir, metrics = config.run_dir, config.metrics
        self.trace_dir = (run_dir / "traces").absolute() if metrics.trace else None
        self._state = ProgressState(config.num_steps, step=resume_step or 0)
        self._console = Console(
            metrics.progress,
            total=config.num_steps,
            done=self._state.step,
            stamp=lambda: f"[{format_seconds(self._state.elapsed_s)}] ",
        )
        self._metrics = MetricsLog(run_dir, resume_step=resume_step)
        self._failures = FailureLog(run_dir, is_new=resume_step is None)
        self._trackers = start_trackers(
            metrics.trackers, run_dir, config=identity or {}, resume_step=resume_step
        )
        self._rollouts = RolloutLog(
            run_dir / "rollouts.jsonl",
            per_step=config.rollouts_per_step,
            seed=config.seed,
            resume_step=resume_step,
        )
        if self.trace_dir is not None and resume_step is None:
            for old in self.trace_dir.glob("*.jsonl"):
                with suppress(OSError):  # no trace ends a run
                    old.unlink()
        self._tracer = Tracer(self.trace_dir, "controller")
        self._lag = LoopLagSampler()
        self.engines: EngineSampler | None = None
        self.take_endpoint: Callable[[], Mapping[str, float]] = dict
        self.take_teachers: Callable[[], Mapping[str, float]] = dict
        self.take_fetches: Callable[[], Sequence[Fetched]] = tuple
        self.take_now: Callable[[], dict[str, Any]] = dict
        self._has_begun = False
        self._has_shown_failures = False
        self._is_async = config.schedule.staleness > 0
        self._advisor = Advisor(
            staleness=config.schedule.staleness,
            is_colocated=config.placement == "colocated",
            shares_cores=plan.shares_cores,
        )
        self._shares_cores = plan.shares_cores
        self.num_devices, self._dollars_per_hour = plan.num_devices, metrics.dollars_per_hour
        self._dtype = "float32" if plan.device == "cpu" else config.policy.dtype
        self._keeps_old_kv = not config.weight_sync.recompute_running_on_pull
        self._warnings: list[str] = []
        self._run_dir = run_dir
        self._serve_options = _serve_options(config.endpoint)
        self._totals: Mapping[str, float] = {}
        self._phases: list[str] = []  # open phases of all loops
        self._seconds: defaultdict[str, float] = defaultdict(float)  # time by phase

    async def __aenter__(self) -> RunRecorder:
        self._now = NowFile(self._run_dir, self._describe_now)
        self._sampling = background(first_of(self._lag.run(), self._now.run()))
        await self._sampling.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._sampling.__aexit__(*error)
        self._now.close(keep=isinstance(error[1], RunTakenOverError))
        if (text := self._advisor.conclude()) is not None:
            self.say(text)
        self._show()
        self._console.close()
        self._metrics.close()
        self._rollouts.close()
        self._failures.close()
        await asyncio.gather(*(asyncio.to_thread(one.close) for one in self._trackers))
        self._tracer.close()

    def decode_by(self, decode: Decode, *, vocab_size: int) -> None:
        """Use ``decode`` for the text of turns whose environment does not provide a text.
        ``vocab_size`` is the policy's."""
        self._rollouts.decode, self._rollouts.vocab_size = decode, vocab_size

    def summarize(self, ending: str, *, resume_command: str, checkpoint: str) -> list[str]:
        """Describe how the run went, and what to do next, after all processes have ended.
        ``ending`` is the reason why the run ended before its last step, or empty. ``checkpoint``
        says where a resumed run would continue; it is shown only if ``ending`` is not empty."""
        trace = self._merge_traces()
        state, run_dir, policy = self._state, self._run_dir, self._run_dir / "policy"
        own_steps = f"{count(state.step - state.first_step, 'step')} in "
        own_steps += format_seconds(state.elapsed_s)
        audit = f"torchtitan-rl audit {run_dir}"
        view = f"torchtitan-rl view {run_dir}"
        if not ending:
            headline = f"done: {own_steps}"
            headline += f", up to step {state.step}" if state.first_step else ""
            serve = shlex.join(["torchtitan-rl", "serve", str(policy), *self._serve_options])
            commands = [serve] if policy.exists() else []
        else:
            where = f"after step {state.step}" if state.step else "before the end of step 1"
            headline = f"{ending} {where} of {state.num_steps}; {own_steps}\n{checkpoint}"
            commands = [resume_command]
        rollouts, adapter = run_dir / "rollouts.jsonl", run_dir / ADAPTER_FOLDER
        outputs = {"policy": policy, "adapter": adapter, "rollouts": rollouts}
        return describe_run(
            run_dir,
            headline=headline,
            warnings=self._warnings,
            seconds=self._seconds,
            totals=self._totals,
            examples=[
                row
                for row in self._rollouts.last_rows.get(Split.TRAIN, ())
                if row["chosen"] != "random"
            ],
            outputs=outputs if trace is None else outputs | {"trace": trace},
            next_commands=[*commands, view, audit],
        )

    def _merge_traces(self) -> Path | None:
        if self.trace_dir is None:
            return None
        try:
            return merge_traces(self.trace_dir, self._run_dir / "trace.json")
        except OSError as error:
            logger.warning("the traces in %s are not merged: %s", self.trace_dir, error)
            return None

    def record_step(self, record: StepRecord) -> None:
        mean_ms, max_ms = self._lag.take()
        metrics = step_metrics(record) | {
            "controller/loop_lag_ms_mean": mean_ms,
            "controller/loop_lag_ms_max": max_ms,
            "controller/hanging_calls": float(abandoned.num_running),
            SHARES_CORES: float(self._shares_cores),
        }
        if self.engines is not None:
            metrics |= self.engines.take()
        metrics |= cost_metrics(
            record, num_devices=self.num_devices, dollars_per_hour=self._dollars_per_hour
        )
        metrics |= self.take_endpoint()
        metrics |= self.take_teachers()
        metrics |= fetch_metrics(self.take_fetches())
        metrics |= self._failures.metrics()
        overlap = overlap_of(metrics)
        if overlap is not None:
            metrics[EFFICIENCY] = overlap.efficiency
            if (text := self._advisor.observe(overlap)) is not None:
                self.say(text)
        # The row is written last, because it describes the rollouts in the other file.
        metrics |= self._rollouts.record(
            record.step,
            record.version,
            record.groups,
            Split.TRAIN,
            record.episodes,
            record.trainer_logprobs,
        )
        self._record(RowKind.STEP, record, metrics, Split.TRAIN)
        self._totals = metrics
        self._show_first_failures(record)
        self._show_first_difference(record.step, metrics)
        self._state.end_step(
            record.step,
            metrics,
            num_failed=num_failed(record.groups),
            buffer=record.buffer if self._is_async else None,
            overlap=overlap if self._is_async else None,
        )
        self._show()
        self._console.line(self._state.describe())

    def _show_first_failures(self, record: StepRecord) -> None:
        """Warn of failed rollouts, once in a run. Steps without anything to train on are left to
        the controller, which explains them."""
        failures = describe_failures(record.groups)
        if failures and record.tokens.trained and not self._has_shown_failures:
            self._has_shown_failures = True
            self.say(
                f"warning: step {record.step}: {failures}; later steps show their number alone, "
                "train/ended_* in metrics.jsonl counts them by status"
            )

    def _show_first_difference(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn if logprobs of trainer and generator differ by more than rounding. The warning is
        shown once in a run, and again at its end."""
        name, most = _MOST_DIFFERENCE[self._dtype]
        value = metrics.get(name, 0.0)
        if value > most and not self._warnings and not self._keeps_old_kv:
            self._warnings.append(
                f"warning: step {step}: {name} is {value:.2g}, above {most:g}: trainer and "
                "generator disagree about tokens of the weights that are trained; see "
                "docs/debugging.md"
            )
            self.say(self._warnings[0])

    def record_evaluation(self, record: EvaluationRecord) -> None:
        metrics = evaluation_metrics(record)
        metrics |= self._rollouts.record(
            record.step, record.version, record.groups, Split.EVALUATION
        )
        self._record(RowKind.EVALUATION, record, metrics, Split.EVALUATION)
        reward = self._state.evaluation = metrics.get("evaluation/reward_mean")
        failures = describe_failures(record.groups)
        self.say(
            f"evaluation after step {record.step}: "
            + (f"reward {'none' if reward is None else format(reward, '.3f')}")
            + (f"; warning: {failures}" if failures else "")
        )

    def record_held_out(self, record: HeldOutRecord) -> None:
        metrics = held_out_metrics(record)
        self._record(RowKind.EVALUATION, record, metrics)
        loss = self._state.evaluation = record.metrics["loss"]
        self.say(f"evaluation after step {record.step}: loss {loss:.4f}")

    def record_account(self, record: AccountRecord) -> None:
        self._record(RowKind.ACCOUNT, record, account_metrics(record))

    def record_failure(self, failure: Failure) -> None:
        """Show and write the report of a failure that has ended: its part serves again, or is given
        up. A row that cannot be written is lost, because the run must go on."""
        self.say(failure.describe())
        try:
            self._failures.record(self._state.step, failure)
        except OutputError as error:
            self.say(f"the failure is not in the file: {error}")

    def _record(
        self,
        kind: RowKind,
        record: StepRecord | EvaluationRecord | HeldOutRecord | AccountRecord,
        metrics: Mapping[str, float],
        split: Split | None = None,
    ) -> None:
        """Write a row, and pass it to the trackers with the rollouts of its ``split``."""
        self._metrics.record(kind, record.step, record.version, metrics)
        rows = () if split is None else self._rollouts.last_rows.get(split, ())
        for tracker in self._trackers:
            tracker.record(record.step, metrics)
            if rows:
                tracker.record_rollouts(record.step, rows)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name in ("rollout", "rows") and not self._has_begun:
            self._has_begun = True
            self._state.start_steps()
        self._phases.append(name)
        self._show()
        start_s = time.monotonic()
        try:
            with self._tracer.span(name, track=name):
                yield
        finally:
            self._seconds[name] += time.monotonic() - start_s
            self._phases.remove(name)
            self._show()

    def say(self, message: str) -> None:
        self._console.say(message)

    def _describe_now(self) -> dict[str, Any]:
        now: dict[str, Any] = {"phase": self._state.phase, "step": self._state.step}
        now |= self.take_now()
        for replica in now.get("replicas", ()):
            stats = None if self.engines is None else self.engines.newest.get(replica["name"])
            if stats is not None:
                replica |= {
                    "running": stats.running,
                    "waiting": stats.waiting,
                    "kv_use": stats.kv_use,
                    "tokens_per_s": stats.tokens_per_second,
                }
        return now

    def _show(self) -> None:
        if self._phases:
            self._state.phase = self._phases[-1]
        self._state.show_on(self._console)


def _serve_options(endpoint: EndpointConfig) -> list[str]:
    """List the options of ``serve`` with which it serves the policy as the run's endpoint did."""
    given = {
        "--endpoint.tool-call-parser": endpoint.tool_call_parser,
        "--endpoint.reasoning-parser": endpoint.reasoning_parser,
        "--endpoint.chat-template": endpoint.chat_template,
    }
    return [word for name, value in given.items() if value for word in (name, str(value))]
