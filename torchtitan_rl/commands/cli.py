"""``torchtitan-rl train CONFIG``, ``serve MODEL``, ``generate`` and ``audit RUN_DIR``.

Exit codes: 0 done; 1 the run failed, or the audit found violations; 2 the configuration is wrong,
or there is no run to audit; 128 + n ended by signal n.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.errors import ConfigError
from torchtitan_rl.weights.leftovers import remove_leftovers

_USAGE = """\
usage: torchtitan-rl train CONFIG [--dry-run] [options]   train as a config file says
       torchtitan-rl train CONFIG --help                  list its options
       torchtitan-rl serve MODEL [--dry-run] [options]    an OpenAI-compatible endpoint
       torchtitan-rl serve --help                         list its options
       torchtitan-rl generate [options]                   complete a file of prompts
       torchtitan-rl generate --help                      list its options
       torchtitan-rl audit RUN_DIR                        check that what a run wrote adds up
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the command; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and not words[0].startswith("-"):
        remove_leftovers()  # shared memory of runs that were killed
    match words:
        case ["train", *rest]:
            return _train(rest)
        case ["generate", *rest]:
            from torchtitan_rl.commands.generate import main as generate

            return generate(rest)
        case ["serve", *rest]:
            from torchtitan_rl.commands.serve import main as serve

            return serve(rest)
        case ["audit", *rest]:
            from torchtitan_rl.audit.command import main as audit

            return audit(rest)
        case ["-h" | "--help"]:
            print(_USAGE, end="")
            return 0
        case _:
            print(_USAGE, end="", file=sys.stderr)
            return 2


def _train(words: list[str]) -> int:
    if not words or words[0].startswith("-"):
        print(_USAGE, end="", file=sys.stderr)
        return 2
    path, options = Path(words[0]), words[1:]
    is_dry_run = "--dry-run" in options
    try:
        from torchtitan_rl.config.loader import load_config
        from torchtitan_rl.config.prepare import claim_run, prepare_run

        config = load_config(path, [option for option in options if option != "--dry-run"])
        prepared = prepare_run(config)
        if is_dry_run:
            print(prepared.describe())
            return 0
        if prepared.is_complete:
            print("\n".join(prepared.notes))
            return 0
        with claim_run(prepared):
            from torchtitan_rl.commands.train import run_training

            return run_training(prepared)
    except ConfigError as error:
        for message in error.errors:
            print(f"error: {message}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
