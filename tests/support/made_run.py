"""The folder of a run that never ran: ``python -m tests.support.made_run FOLDER [--steps 1000]``.

Rows, traces and files are written by the run's own writers; what they say is drawn from a seed. Of
``RolloutLog``'s rollouts all are chosen, so a step has ``rollouts`` rows. A step takes ten seconds
by the clock of the rows.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from torchtitan_rl.config.resume import write_identity, write_manifest
from torchtitan_rl.observability.metrics import evaluation_metrics, step_metrics
from torchtitan_rl.observability.rollouts import RolloutLog
from torchtitan_rl.observability.sinks import RowKind, RowLog, Split
from torchtitan_rl.observability.trace import Tracer
from torchtitan_rl.orchestration.records import (
    BufferStates,
    EvaluationRecord,
    LedgerTotals,
    StepRecord,
    TokenCounts,
)
from torchtitan_rl.rollout.episodes import rollout_to_episodes
from torchtitan_rl.types import (
    Completion,
    CompletionMetrics,
    Episode,
    FinishReason,
    Problem,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Turn,
    VersionRun,
)

POLICY = Path(__file__).parents[2] / "experiments" / "alphabet_sort" / "policy"
NAMES = ("Ada", "Berta", "Carl", "Dora", "Emil", "Frida", "Gustav", "Hanna", "Ida", "Jonas", "Otto")
GROUP_SIZE = 5
STEP_S = 10.0
BEGIN_S = 1_800_000_000.0
STALENESS = 2


class RunMaker:
    """Draws the rollouts of a run that learns: rewards rise from about 0.2 to about 0.8."""

    def __init__(self, *, steps: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._steps = steps
        self._tokenizer = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
        self._answers = [self._answer() for _ in range(400)]
        self._prompt = tuple(self._tokenizer.encode("Sort the names alphabetically.").ids)

    def groups(self, step: int, number: int, split: Split) -> tuple[RolloutGroup, ...]:
        return tuple(self._group(step, index, split) for index in range(number))

    def _group(self, step: int, index: int, split: Split) -> RolloutGroup:
        rng = self._rng
        problem_id = f"{split.value}/{rng.randrange(400) if split is Split.TRAIN else index}"
        group_id = f"e0/{problem_id}/{step}-{index}"
        names = rng.sample(NAMES, 4)
        problem = Problem(problem_id=problem_id, data={"names": names, "kind": "made"})
        size = GROUP_SIZE if split is Split.TRAIN else 1
        rollouts = tuple(self._rollout(step, group_id, problem, n, split) for n in range(size))
        return RolloutGroup(group_id=group_id, problem=problem, rollouts=rollouts)

    def _rollout(
        self, step: int, group_id: str, problem: Problem, sibling: int, split: Split
    ) -> Rollout:
        rng = self._rng
        status = rng.choices(list(RolloutStatus)[:4], weights=[90, 5, 3, 2])[0]
        turns: list[Turn] = []
        question = f"Sort these names: {', '.join(problem.data['names'])}"
        messages = [{"role": "user", "content": question}]
        prompt = self._prompt
        oldest = 0 if split is Split.EVALUATION else rng.choice((0, 0, 0, 1, STALENESS))
        version = max(0, step - (split is Split.TRAIN) - oldest)
        for n in range(rng.choice((1, 2, 2, 3))):
            text, ids = rng.choice(self._answers)
            turns.append(self._turn(f"{group_id}/r{sibling}/t{n}", prompt, text, ids, version))
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"Turn {n + 2}: sort again."},
            ]
            prompt = (*prompt, *ids, *self._prompt[:3])
        progress = 0.2 + 0.6 * step / self._steps
        reward = min(1.0, max(0.0, rng.gauss(progress, 0.15)))
        return Rollout(
            rollout_id=f"{group_id}/r{sibling}",
            group_id=group_id,
            problem_id=problem.problem_id,
            turns=tuple(turns),
            status=status,
            reward=None if status.is_failure else reward,
            cause="ValueError: made to fail" if status.is_failure else None,
            messages=tuple(messages[:-1]),
            metrics={"right": float(reward > 0.5)},
            phase_s={"environment": rng.random(), "generation": 2 * rng.random()},
        )

    def _turn(
        self, name: str, prompt: tuple[int, ...], text: str, ids: tuple[int, ...], version: int
    ) -> Turn:
        rng = self._rng
        metrics = CompletionMetrics(
            queue_s=0.01,
            time_to_first_token_s=0.02,
            decode_s=0.1,
            inter_token_latency_s=rng.uniform(0.01, 0.02),
            requests_in_flight=rng.randrange(1, 32),
            cached_tokens=len(prompt) // 2,
        )
        runs = (VersionRun(0, version),)
        if len(ids) > 4 and rng.random() < 0.1:
            runs = (VersionRun(0, version), VersionRun(3, version + 1))
        completion = Completion(
            request_id=name,
            token_ids=ids,
            logprobs=tuple(-rng.random() for _ in ids),
            version_runs=runs,
            finish_reason=FinishReason.STOP,
            metrics=metrics,
            replica=f"replica{rng.randrange(2)}",
        )
        return Turn(prompt_token_ids=prompt, completion=completion, text=text)

    def _answer(self) -> tuple[str, tuple[int, ...]]:
        names = self._rng.sample(NAMES, self._rng.randrange(2, 7))
        text = "\n".join(sorted(names) if self._rng.random() < 0.7 else names)
        return text, tuple(self._tokenizer.encode(text).ids)

    def episodes(self, groups: Sequence[RolloutGroup]) -> tuple[Episode, ...]:
        made: list[Episode] = []
        for group in groups:
            rewards = [one.reward for one in group.rollouts if one.reward is not None]
            mean = sum(rewards) / len(rewards) if rewards else 0.0
            for one in group.rollouts:
                if one.reward is not None:
                    made += rollout_to_episodes(one, one.reward - mean)
        return tuple(made)

    def step_record(self, step: int, groups: tuple[RolloutGroup, ...]) -> StepRecord:
        rng = self._rng
        tokens = sum(one.num_sampled_tokens for group in groups for one in group.rollouts)
        discarded = tokens // 50
        return StepRecord(
            step=step,
            version=step,
            groups=groups,
            tokens=TokenCounts(
                generated=tokens, trained=tokens - discarded, discarded={"env_error": discarded}
            ),
            trainer={
                "loss": rng.gauss(0.0, 0.01),
                "entropy": 1.0 - 0.5 * step / self._steps + rng.gauss(0.0, 0.02),
                "grad_norm": rng.uniform(0.5, 1.5),
                "ratio_mean": 1.0 + rng.gauss(0.0, 0.001),
                "clip_share": rng.uniform(0.0, 0.02),
                "learning_rate": 1e-3,
                "age_0/logprob_diff_mean": 1e-5,
            },
            publish_s=0.2,
            rollout_s=6.0 + rng.random(),
            train_s=2.5,
            wall_s=STEP_S,
            trainer_busy_s=3.0,
            buffer=BufferStates(
                waiting=2, running=20, finished=5, batched=len(groups), capacity=40
            ),
            totals=LedgerTotals(
                tokens_generated=step * tokens,
                tokens_trained=step * (tokens - discarded),
                tokens_masked={},
                tokens_discarded={"env_error": step * discarded},
                tokens_buffered=0,
                groups_admitted=step * len(groups),
                groups_trained=step * len(groups),
                groups_discarded={},
                groups_buffered=0,
            ),
        )


def made_run(
    folder: Path, *, steps: int = 20, rollouts: int = 50, seed: int = 0, is_finished: bool = True
) -> Path:
    """Write the folder of a run with ``rollouts`` rows a step, and an evaluation each tenth."""
    maker = RunMaker(steps=steps, seed=seed)
    folder.mkdir(parents=True)
    write_identity(folder, _identity(steps))
    shutil.copytree(POLICY, folder / "policy", ignore=shutil.ignore_patterns("*.safetensors"))
    rows = RowLog(folder / "metrics.jsonl", is_new=True)
    log = RolloutLog(folder / "rollouts.jsonl", per_step=rollouts, seed=seed)
    for step in range(steps + 1):
        if step % max(1, steps // 10) == 0:
            groups = maker.groups(step, 8, Split.EVALUATION)
            record = EvaluationRecord(
                step=step, version=step, groups=groups, seconds=2.0, success_reward=0.5
            )
            logged = log.record(step, step, groups, Split.EVALUATION)
            rows.append(_row(RowKind.EVALUATION, step, evaluation_metrics(record) | logged))
        if step:
            groups = maker.groups(step, rollouts // GROUP_SIZE, Split.TRAIN)
            record = maker.step_record(step, groups)
            logged = log.record(step, step, groups, Split.TRAIN, maker.episodes(groups))
            idle = {"overlap/generator_idle_share": 0.3, "overlap/shares_cores": 0.0}
            rows.append(_row(RowKind.STEP, step, step_metrics(record) | logged | idle))
    rows.close()
    log.close()
    _make_traces(folder / "traces", steps)
    if is_finished:
        write_manifest(folder)
    return folder


def _row(kind: RowKind, step: int, metrics: dict[str, float]) -> dict[str, object]:
    head = {"kind": kind, "step": step, "wall_time_s": BEGIN_S + STEP_S * step, "version": step}
    return head | {name: float(value) for name, value in metrics.items()}


def _identity(steps: int) -> dict[str, object]:
    return {
        "num_steps": steps,
        "seed": 0,
        "task": "tests.support.made_run",
        "rollout.sampling.temperature": 1.0,
        "schedule.staleness": STALENESS,
        "trainer.optimizer.learning_rate": 1e-3,
    }


def _make_traces(folder: Path, steps: int) -> None:
    clock_ns = round(BEGIN_S * 1e9) - (time.time_ns() - time.perf_counter_ns())
    spans = {
        "controller": [("rollout", 0.2, 6.7), ("train", 6.8, 9.3), ("publish", 9.4, 9.6)],
        "trainer rank 0": [("optimizer step", 6.9, 9.2), ("publish", 9.4, 9.5)],
        "replica0 rank 0": [("decode", 0.3 + 0.4 * n, 0.6 + 0.4 * n) for n in range(15)],
        "replica1 rank 0": [("decode", 0.3 + 0.4 * n, 0.5 + 0.4 * n) for n in range(15)],
    }
    for process, of_step in spans.items():
        tracer = Tracer(folder, process)
        for step in range(steps):
            for name, begin_s, end_s in of_step:
                begin, end = (
                    clock_ns + round(1e9 * (STEP_S * step + one_s)) for one_s in (begin_s, end_s)
                )
                track = name if process == "controller" else "main"
                tracer.complete(name, begin, end, track=track, step=step)
        tracer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rollouts", type=int, default=50)
    given = parser.parse_args()
    start_s = time.monotonic()
    made_run(given.folder, steps=given.steps, rollouts=given.rollouts)
    size = sum(one.stat().st_size for one in given.folder.rglob("*") if one.is_file())
    print(json.dumps({"seconds": time.monotonic() - start_s, "bytes": size}))


if __name__ == "__main__":
    main()
