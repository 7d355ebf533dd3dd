"""``python -m tests.campaign SEED`` shows one case; ``--cases`` and ``--seconds`` run many."""

from __future__ import annotations

import argparse
import logging
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TextIO

from tests.campaign.case import Case, run_case

_CHUNK = 25
_MAX_BYTES = 4 << 30
_LIMIT_S = 60.0  # of real time, for one case


class _TooLong(BaseException):
    """A case that takes for ever: a loop without an await, or one that spins."""


def _give_up(number: int, frame: object) -> None:
    raise _TooLong


def prepare_process() -> None:
    """Of a process that runs cases: quiet about what a kill abandons, and bounded."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    sys.unraisablehook = lambda args: None
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    signal.signal(signal.SIGALRM, _give_up)


def _run_chunk(seeds: range) -> list[tuple[int, tuple[str, ...], str]]:
    results = []
    for seed in seeds:
        signal.setitimer(signal.ITIMER_REAL, _LIMIT_S)
        try:
            case: Case = run_case(seed)
        except BaseException:
            results.append((seed, ("the_campaign_itself",), traceback.format_exc()))
            continue
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        kinds = tuple(dict.fromkeys(violation.kind for violation in case.violations))
        results.append((seed, kinds, case.describe() if kinds else ""))
    return results


def run_many(first: int, cases: int, seconds: float, jobs: int, out: Path | None) -> int:
    started = time.monotonic()
    kinds: Counter[str] = Counter()
    examples: dict[str, list[int]] = {}
    num_run = num_failed = 0
    file = out.open("w") if out is not None else sys.stdout
    chunks = (range(s, min(s + _CHUNK, first + cases)) for s in range(first, first + cases, _CHUNK))
    with ProcessPoolExecutor(jobs, initializer=prepare_process) as pool:
        pending = []
        for chunk in chunks:
            if time.monotonic() - started > seconds:
                break
            pending.append(pool.submit(_run_chunk, chunk))
            if len(pending) < 2 * jobs:
                continue
            for seed, found, text in pending.pop(0).result():
                num_run, num_failed = num_run + 1, num_failed + bool(found)
                _note(seed, found, text, kinds, examples, file)
        for future in pending:
            for seed, found, text in future.result():
                num_run, num_failed = num_run + 1, num_failed + bool(found)
                _note(seed, found, text, kinds, examples, file)
    took = time.monotonic() - started
    print(f"{num_run} cases in {took:.0f} s, {num_failed} with violations")
    for kind, number in kinds.most_common():
        print(f"  {number:6} {kind}: seeds {examples[kind]}")
    return 1 if num_failed else 0


def _note(
    seed: int,
    found: tuple[str, ...],
    text: str,
    kinds: Counter[str],
    examples: dict[str, list[int]],
    file: TextIO,
) -> None:
    for kind in found:
        kinds[kind] += 1
        if len(examples.setdefault(kind, [])) < 12:
            examples[kind].append(seed)
    if found:
        print(text, "\n", file=file, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign")
    parser.add_argument("seed", type=int, nargs="?", help="show this case")
    parser.add_argument("--cases", type=int, default=0, help="run so many, from --first on")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where failing cases are described")
    options = parser.parse_args()
    if options.seed is not None:
        prepare_process()
        case = run_case(options.seed)
        print(case.describe())
        return 1 if case.violations else 0
    cases = options.cases or 10**9
    return run_many(options.first, cases, options.seconds, options.jobs, options.out)


if __name__ == "__main__":
    sys.exit(main())
