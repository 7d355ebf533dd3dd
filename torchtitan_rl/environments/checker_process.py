"""The process that runs the functions of `checkers`: a JSON line in, two out.

The first line says that the function's module is loaded, so that the time limit is the function's
alone; the second has its result. A call that is not answered in time ends the process by a signal
of the kernel, whatever the function does.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

_MEMORY_BYTES = 8 << 30  # of addresses; libraries reserve more than they use
_GRACE_S = 1.0  # the calling process gives up first, and kills this one


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what functions print is no answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            function = _load(request["function"])
        except Exception as error:
            answers.write(_error(error))
            continue
        answers.write("{}\n")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"] + _GRACE_S)
        try:
            answer = json.dumps({"result": function(*request["args"])}) + "\n"
        except MemoryError:
            os._exit(1)  # nothing can be relied on any more
        except Exception as error:
            answer = _error(error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(answer)


@functools.cache
def _load(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), attribute)
    return function


def _error(error: BaseException) -> str:
    return json.dumps({"error": " ".join(f"{type(error).__name__}: {error}".split())}) + "\n"


if __name__ == "__main__":
    main()
