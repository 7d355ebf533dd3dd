"""``python -m tests.campaign SEED`` shows one case; ``--cases`` and ``--seconds`` run many.
``--of`` chooses the kind of runs."""

from __future__ import annotations

import argparse
import logging
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import get_args

from tests.campaign.case import Case, Kind, run_case

_CHUNK = 25
_MAX_BYTES = 4 << 30
# For one case: of CPU time, which a busy machine does not use up, and of real time.
_LIMITS_S = {signal.ITIMER_PROF: 60.0, signal.ITIMER_REAL: 900.0}


class _TooLong(BaseException):
    """A case that does not end: a loop without an await, one that spins, or a wait in a thread."""


def _give_up(number: int, frame: object) -> None:
    raise _TooLong


def prepare_process() -> None:
    """Of a process that runs cases: quiet about what a kill abandons, and bounded."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    sys.unraisablehook = lambda args: None
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    signal.signal(signal.SIGALRM, _give_up)
    signal.signal(signal.SIGPROF, _give_up)


def _run_chunk(seeds: range, kind: Kind) -> list[tuple[int, tuple[str, ...], str]]:
    results = []
    for seed in seeds:
        for timer, limit_s in _LIMITS_S.items():
            signal.setitimer(timer, limit_s)
        try:
            case: Case = run_case(seed, kind)
        except BaseException:
            text = f"seed {seed}: {traceback.format_exc()}"
            results.append((seed, ("the_campaign_itself",), text))
            continue
        finally:
            for timer in _LIMITS_S:
                signal.setitimer(timer, 0)
        names = tuple(dict.fromkeys(violation.name for violation in case.violations))
        results.append((seed, names, case.describe() if names else ""))
    return results


def run_many(
    first: int, cases: int, seconds: float, jobs: int, out: Path | None, kind: Kind
) -> int:
    started = time.monotonic()
    seeds_of: dict[str, list[int]] = {}  # by name of violation
    num_run = num_failed = 0
    file = out.open("w") if out is not None else sys.stdout
    for seed, names, text in _results(range(first, first + cases), started + seconds, jobs, kind):
        num_run += 1
        for name in names:
            seeds_of.setdefault(name, []).append(seed)
        if names:
            num_failed += 1
            print(text, "\n", file=file, flush=True)
    took = time.monotonic() - started
    print(f"{num_run} cases in {took:.0f} s, {num_failed} with violations")
    for name, seeds in sorted(seeds_of.items(), key=lambda pair: -len(pair[1])):
        print(f"  {len(seeds):6} {name}: seeds {seeds[:12]}")
    return 1 if num_failed else 0


def _results(
    seeds: range, deadline: float, jobs: int, kind: Kind
) -> Iterator[tuple[int, tuple[str, ...], str]]:
    """Of as many cases as can be started before ``deadline``, in order."""
    pending: deque[Future[list[tuple[int, tuple[str, ...], str]]]] = deque()
    with ProcessPoolExecutor(jobs, initializer=prepare_process) as pool:
        for start in range(0, len(seeds), _CHUNK):
            if time.monotonic() > deadline:
                break
            pending.append(pool.submit(_run_chunk, seeds[start : start + _CHUNK], kind))
            if len(pending) == 2 * jobs:
                yield from pending.popleft().result()
        for future in pending:
            yield from future.result()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.campaign")
    parser.add_argument("seed", type=int, nargs="?", help="show this case")
    parser.add_argument(
        "--of", choices=get_args(Kind), default="rollouts", dest="kind", help="the kind of runs"
    )
    parser.add_argument("--cases", type=int, default=0, help="run so many, from --first on")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start none after")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="where failing cases are described")
    options = parser.parse_args()
    if options.seed is not None:
        prepare_process()
        case = run_case(options.seed, options.kind)
        print(case.describe())
        return 1 if case.violations else 0
    cases = options.cases or 10**9
    return run_many(options.first, cases, options.seconds, options.jobs, options.out, options.kind)


if __name__ == "__main__":
    sys.exit(main())
