"""Compares training runs of TRL's `GRPOTrainer` with ours: steps per second on the same work.

    python -m benchmarks.peers [--repeats 5] [--steps 10] [--workloads "long prompt" ...]

Each side is a run of its own. The sides run alternately on the same cores:

- TRL: generation by `transformers`, in batches of all answers of a step; training on padded rows;
- ours, S=0: `torchtitan-rl train`, synchronous, two replicas, two trainer threads, not pinned;
- ours, S=1: like S=0, but with ``--schedule.staleness 1``.

Two workloads have prompts of 205 or 16 tokens, and answers of at most 64 tokens that end when the
policy samples the end token. The third has answers of fixed, heavy-tailed lengths (see
`peers_work`). Policy, prompts, group size, limits, loss and optimizer are the same.

A step is everything between the ends of two optimizer steps. The first two steps are left out,
because caches fill in them. The last two are left out, because the asynchronous side generates
nothing any more in them. TRL (the extra ``peers``) gets an environment of its own, made on first
use. A run that is already in ``--output-dir`` is read instead of repeated; the options of that
folder must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import mkdtemp

from benchmarks.options import at_least, core, keep_options
from benchmarks.peers_config import config as our_config
from benchmarks.peers_report import FIRST, LAST, SideRun, report
from benchmarks.peers_setup import peers_python, require_replaceable, requirements
from benchmarks.peers_work import WORKLOADS, Workload, write_policies
from benchmarks.report import machine
from benchmarks.training_runs import ROOT, train

CONFIG = ROOT / "benchmarks" / "peers_config.py"
TRL, STALENESS = "TRL", {"ours, S=0": 0, "ours, S=1": 1}
# Options that change what is measured. The cores change it, too.
OF_RUNS = ("steps", "groups", "group_size", "max_tokens", "median", "row_len", "trl_microbatch")


def main() -> None:
    options = _options()
    require_replaceable(options.environment)
    workloads = {name: workload_of(name, options) for name in options.workloads}
    for workload in workloads.values():
        trl_microbatch(options, workload)
    if options.cores:
        os.sched_setaffinity(0, options.cores)  # all processes of all sides inherit it
    facts = machine()
    folder = (options.output_dir or Path(mkdtemp(prefix="peers-"))).absolute()
    of_runs = {name: vars(options)[name] for name in OF_RUNS}
    keep_options(folder, {**of_runs, "cores": sorted(os.sched_getaffinity(0))})
    policies = write_policies(folder)
    runs: dict[str, dict[str, list[SideRun]]] = {}
    for repeat in range(options.repeats):
        for name, workload in workloads.items():
            place = folder / name.replace(" ", "-") / str(repeat)
            place.mkdir(parents=True, exist_ok=True)
            for side, run_side in sides(options, workload, policies, place).items():
                run = run_side()
                runs.setdefault(name, {}).setdefault(side, []).append(run)
                print(f"{name}, {side}, repeat {repeat}: {run.steady_s:.2f} s/step", flush=True)
    settings = {name: str(value) for name, value in vars(options).items()}
    report(runs, workloads, {"machine": facts, "options": settings}, options.output, base=TRL)


def sides(
    options: argparse.Namespace, workload: Workload, policies: tuple[Path, Path], place: Path
) -> dict[str, Callable[[], SideRun]]:
    ends, endless = policies

    def ours(staleness: int) -> SideRun:
        policy = endless if workload.median else ends
        words = our_words(options, workload, policy, staleness=staleness)
        run = train(CONFIG, words, run_dir=place / f"ours-s{staleness}")
        return SideRun(
            seconds=run.column("time/step_s"),
            rollout_s=run.column("time/rollout_s"),
            generated=[int(number) for number in run.column("tokens/generated")],
            command_s=run.seconds,
            packages={},
        )

    return {
        TRL: lambda: run_trl(options, workload, ends, place),
        **{side: lambda s=s: ours(s) for side, s in STALENESS.items()},
    }


def run_trl(options: argparse.Namespace, workload: Workload, policy: Path, place: Path) -> SideRun:
    """
    Raises:
        SystemExit: the run failed; its output is shown.
    """
    record = place / "trl.json"
    if not record.exists():
        python = peers_python(options.environment, requirements())
        steps, work = place / "trl-steps.json", place / "trl-work.json"
        work.write_text(json.dumps(trl_work(options, workload, policy, place, steps)))
        started = time.monotonic()
        done = subprocess.run(
            [str(python), "-m", "benchmarks.peers_trl", str(work)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": str(threads()), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"TRL's side failed:\n{done.stdout[-3000:]}")
        command_s = time.monotonic() - started
        record.write_text(json.dumps(json.loads(steps.read_text()) | {"command_s": command_s}))
    return SideRun(**json.loads(record.read_text()))


def trl_work(
    options: argparse.Namespace, workload: Workload, policy: Path, place: Path, output: Path
) -> dict[str, object]:
    return {
        "workload": asdict(workload),
        "policy": str(policy),
        "steps": options.steps,
        "seed": our_config.seed,
        "optimizer": asdict(our_config.trainer.optimizer),
        "microbatch": trl_microbatch(options, workload),
        "output_dir": str(place / "trl"),
        "output": str(output),
    }


def trl_microbatch(options: argparse.Namespace, workload: Workload) -> int:
    """
    Raises:
        SystemExit: TRL's step would not have all answers.
    """
    size: int = options.trl_microbatch or workload.answers
    if workload.answers % size:
        raise SystemExit(
            f"--trl-microbatch {size}: give a divisor of the {workload.answers} answers of a step "
            "(--groups x --group-size)"
        )
    return size


def our_words(
    options: argparse.Namespace, workload: Workload, policy: Path, *, staleness: int
) -> list[str]:
    """Return the options of `torchtitan-rl train` for a workload."""
    length = workload.prompt_tokens + workload.longest
    return [
        *("--policy.checkpoint", str(policy)),
        *("--num-steps", str(options.steps)),
        *("--schedule.staleness", str(staleness)),
        *("--rollout.groups-per-step", str(workload.groups)),
        *("--rollout.group-size", str(workload.group_size)),
        *("--rollout.sampling.max-tokens-per-turn", str(workload.longest)),
        *("--rollout.max-total-tokens", str(length)),
        *("--generator.max-model-len", str(length)),
        *("--trainer.max-episode-tokens", str(max(options.row_len, length))),
        *("--trainer.max-tokens-per-microbatch", str(8 * max(options.row_len, length))),
        *("--trainer.threads", str(threads())),
        *("--checkpoint.every", "0"),
        "--checkpoint.no-export-hf",
        *("--task.prompt-tokens", str(workload.prompt_tokens)),
        *("--task.max-tokens", str(workload.max_tokens)),
        *("--task.median", str(workload.median)),
    ]


def threads() -> int:
    """The number of threads of one side: one for each core of this process."""
    return len(os.sched_getaffinity(0))


def workload_of(name: str, options: argparse.Namespace) -> Workload:
    workload = replace(WORKLOADS[name], groups=options.groups, group_size=options.group_size)
    if options.max_tokens and not workload.median:
        workload = replace(workload, max_tokens=options.max_tokens)
    if options.median and workload.median:
        workload = replace(workload, median=options.median)
    return workload


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    count = at_least(1)
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument(
        "--steps", type=at_least(FIRST + LAST + 1), default=10, help="optimizer steps of a run"
    )
    parser.add_argument("--groups", type=count, default=8, help="of an optimizer step")
    parser.add_argument("--group-size", type=at_least(2), default=8)
    parser.add_argument("--max-tokens", type=count, help="of answers whose end is sampled")
    parser.add_argument("--median", type=count, help="of fixed lengths")
    parser.add_argument("--row-len", type=count, default=1024, help="of our trainer")
    parser.add_argument(
        "--trl-microbatch", type=count, help="rows of TRL's forward pass; all answers of a step"
    )
    parser.add_argument("--cores", type=core, nargs="+", help="that every side runs on")
    parser.add_argument(
        "--environment",
        type=Path,
        default=Path("outputs/peers-venv"),
        help="with TRL: a folder that an earlier run made, or that is empty or missing",
    )
    parser.add_argument("--output-dir", type=Path, help="of the runs")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/peers.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
