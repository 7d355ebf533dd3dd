"""``torchtitan-rl train CONFIG``, ``serve MODEL``, ``generate``, ``eval MODEL --config CONFIG``,
``data preview CONFIG``, ``new task NAME``, ``env check CONFIG``, ``audit RUN_DIR``,
``worker --address ADDRESS``, ``keys --hosts HOST...`` and ``launch-script KIND CONFIG``.

Exit codes: 0 done; 1 the run failed, or a check found something; 2 the configuration is wrong, or
there is no run to audit; 128 + n: ended by signal n.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from torchtitan_rl.commands.console import exit_code_of
from torchtitan_rl.weights.leftovers import remove_leftovers

_USAGE = """\
usage: torchtitan-rl train CONFIG [--dry-run] [options]   train as a config file says
       torchtitan-rl train CONFIG --help                  list its options
       torchtitan-rl serve MODEL [--dry-run] [options]    an OpenAI-compatible endpoint
       torchtitan-rl serve --help                         list its options
       torchtitan-rl generate [options]                   complete a file of prompts
       torchtitan-rl generate --help                      list its options
       torchtitan-rl eval MODEL... --config CONFIG        evaluate models, side by side
       torchtitan-rl eval --help                          list its options
       torchtitan-rl data preview CONFIG [options]        show the problems of a task
       torchtitan-rl new task NAME                        write a task to start from
       torchtitan-rl env check CONFIG [options]           find mistakes of an environment
       torchtitan-rl audit RUN_DIR                        check that what a run wrote adds up
       torchtitan-rl worker --address ADDRESS             make this machine a host of runs
       torchtitan-rl keys --hosts HOST... [options]       make TLS keys for a run's machines
       torchtitan-rl launch-script KIND CONFIG --hosts 4x8 --keys DIR  for Slurm, SSH, containers
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Monarch's own log, /tmp/USER/monarch_log.log, has no limit: it gets errors alone.
    os.environ.setdefault("MONARCH_FILE_LOG", "error")
    if words and not words[0].startswith("-"):
        remove_leftovers()  # shared memory of runs that were killed
    return exit_code_of(lambda: _run(words))


def _run(words: list[str]) -> int:
    match words:
        case ["train", config, *options] if not config.startswith("-"):
            from torchtitan_rl.commands.train import main as train

            return train(config, options)
        case ["generate", *rest]:
            from torchtitan_rl.commands.generate import main as generate

            return generate(rest)
        case ["serve", *rest]:
            from torchtitan_rl.commands.serve import main as serve

            return serve(rest)
        case ["eval", *rest]:
            from torchtitan_rl.commands.evaluate import main as evaluate

            return evaluate(rest)
        case ["data", *rest]:
            from torchtitan_rl.commands.data import main as data

            return data(rest)
        case ["new", *rest]:
            from torchtitan_rl.commands.new import main as new

            return new(rest)
        case ["env", *rest]:
            from torchtitan_rl.commands.env import main as env

            return env(rest)
        case ["audit", *rest]:
            from torchtitan_rl.audit.command import main as audit

            return audit(rest)
        case ["worker", *rest]:
            from torchtitan_rl.commands.worker import main as worker

            return worker(rest)
        case ["keys", *rest]:
            from torchtitan_rl.commands.keys import main as keys

            return keys(rest)
        case ["launch-script", *rest]:
            from torchtitan_rl.commands.launch_script import main as launch_script

            return launch_script(rest)
        case ["-h" | "--help"]:
            print(_USAGE, end="")
            return 0
        case _:
            print(_USAGE, end="", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
