"""``torchtitan-rl audit RUN_DIR``: checks whether everything that a run wrote adds up.

Exit codes: 0 all checks hold, one line each; 1 some do not, with a line for each violation; 2 there
is no such run, it cannot be read, or it is running, so that its files change meanwhile.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.audit.audit_run import audit
from torchtitan_rl.config.run_lock import lock_errors
from torchtitan_rl.errors import ConfigError

_USAGE = "usage: torchtitan-rl audit RUN_DIR    of a run that is not running\n"


def main(words: Sequence[str]) -> int:
    if list(words) in (["-h"], ["--help"]):
        print(_USAGE, end="")
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError("RUN_DIR: give the folder of one run, which is not running")
    if held := lock_errors(Path(words[0])):
        print(f"error: a run is audited when it has ended: {held[0]}", file=sys.stderr)
        return 2
    try:
        checks = audit(Path(words[0]))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for check in checks:
        print(check.summary)
    violations = [violation for check in checks for violation in check.violations]
    for violation in violations:
        print(f"violation: {violation}", file=sys.stderr)
    return 1 if violations else 0
