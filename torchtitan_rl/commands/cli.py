"""The commands of ``torchtitan-rl``, see ``torchtitan-rl --help``.

Exit codes: 0 done; 1 the run failed, or a check found something; 2 the command or configuration is
wrong, or there is no run to audit; 128 + n: ended by signal n.
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Sequence

from torchtitan_rl.commands.console import exit_code_of
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.monarch_environment import set_monarch_defaults
from torchtitan_rl.launch.own_user import use_private_folder
from torchtitan_rl.weights.shm_cleanup import remove_leftovers

COMMANDS = {
    "train": ("CONFIG [options]", "train as a configuration says", "train"),
    "sft": ("CONFIG [options]", "fine-tune on conversations", "supervised:sft"),
    "dpo": ("CONFIG [options]", "train on pairs of answers", "supervised:dpo"),
    "serve": ("MODEL [options]", "an OpenAI-compatible endpoint", "serve"),
    "generate": ("[options]", "complete a file of prompts", "generate"),
    "eval": ("MODEL... --config CONFIG [options]", "evaluate models, side by side", "evaluate"),
    "data preview": ("CONFIG [options]", "show the problems of a task", "data"),
    "new task": ("NAME [options]", "write a task to start from", "new"),
    "env check": ("CONFIG [options]", "find mistakes of an environment", "env"),
    "doctor": ("[CONFIG [options]]", "check this machine", "doctor"),
    "fit": ("CONFIG --devices 1x24GB [options]", "propose options that fit on devices", "fit"),
    "profile": ("RUN_DIR [options]", "measure a run, to simulate others", "profile"),
    "simulate": ("CONFIG --profile FILE [options]", "predict a run, of any size", "simulate"),
    "chaos": ("RUN_DIR [options]", "disturb a running run, then audit it", "chaos"),
    "view": ("RUN_DIR... [options]", "show runs on a page in the browser", "view"),
    "report": ("RUN_DIR [options]", "write the page of a run into one file", "report"),
    "explain": ("RUN_DIR", "say in words what a run shows", "explain"),
    "retriever": ("--corpus FILE [options]", "search a corpus, for tasks", "retriever"),
    "replay": ("RUN_DIR [options]", "compute a step of a run again", "replay"),
    "scale": ("RUN_DIR --replicas N", "change the replicas of a running run", "scale"),
    "audit": ("RUN_DIR", "check that what a run wrote adds up", ".audit.run"),
    "worker": ("--address ADDRESS", "make this machine a host of runs", "worker"),
    "keys": ("--hosts HOST... [options]", "make TLS keys for a run's machines", "keys"),
    "launch-script": (
        "KIND CONFIG --hosts 4x8 --keys DIR",
        "for Slurm, Kubernetes, SSH or Compose",
        "launch_script",
    ),
}
"""For the words that name a command: the command's arguments, a description, and the module (seen
from this one's package) whose ``main``, or the function after the colon, gets the remaining words.
It returns the exit code, and raises `ConfigError` if the command cannot start as it is given. For
``--help`` alone, the module's ``HELP`` is printed, if it has one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``torchtitan-rl``; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    set_monarch_defaults()
    if words and not words[0].startswith("-"):
        remove_leftovers()  # shared memory of runs that were killed
    return exit_code_of(lambda: _run(words))


def _run(words: list[str]) -> int:
    for command, (_, _, place) in COMMANDS.items():
        first = command.split()
        if words[: len(first)] == first:
            rest = words[len(first) :]
            if command != "worker":  # each incarnation of a worker makes its own folder
                use_private_folder()  # before importing torch, which stores the path of its cache
            module, _, name = place.partition(":")
            found = importlib.import_module(f".{module}", "torchtitan_rl.commands")
            if hasattr(found, "HELP") and rest in (["-h"], ["--help"]):
                print(found.HELP, end="")
                return 0
            return int(getattr(found, name or "main")(rest))
    match words:
        case ["-h" | "--help"]:
            print(_usage(""))
            print("Each command has --help. torchtitan-rl --version: what is installed.")
        case [group, "-h" | "--help"] if usage := _usage(f"{group} "):
            print(usage)
        case ["--version"]:
            from torchtitan_rl.config.loader import installed

            own, *others = (f"{name} {version}" for name, version in installed().items())
            print(f"{own} ({', '.join(others)})")
        case _:
            raise ConfigError(_unknown(words))
    return 0


def _usage(prefix: str) -> str:
    return "\n".join(
        f"torchtitan-rl {f'{command} {arguments}':<50} {what}"
        for command, (arguments, what, _) in COMMANDS.items()
        if command.startswith(prefix)
    )


def _unknown(words: list[str]) -> str:
    commands = f"give one of {', '.join(COMMANDS)}; see torchtitan-rl --help"
    if not words:
        return f"a command is missing: {commands}"
    firsts = {command.split()[0]: command for command in COMMANDS}
    given = " ".join(words[: 2 if words[0] in firsts else 1])
    similar = difflib.get_close_matches(words[0], firsts, n=1)
    fix = f"did you mean {firsts[similar[0]]}? See torchtitan-rl --help" if similar else commands
    return f"{given!r} is no command: {fix}"


if __name__ == "__main__":
    sys.exit(main())
