"""``torchtitan-rl audit RUN_DIR``: checks whether everything that a run wrote adds up.

Exit codes: 0 all checks hold, one line each; 1 some do not, with a line for each violation; 2 there
is no such run, or it cannot be read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_rl.audit.audit_run import audit
from torchtitan_rl.audit.findings import Check
from torchtitan_rl.config.run_lock import lock_errors
from torchtitan_rl.errors import ConfigError

_USAGE = "usage: torchtitan-rl audit RUN_DIR    of a run, or the folder of an evaluation\n"


def main(words: Sequence[str]) -> int:
    if list(words) in (["-h"], ["--help"]):
        print(_USAGE, end="")
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError("RUN_DIR: give the folder of one run, or of an evaluation")
    run_dir = Path(words[0])
    is_running = bool(lock_errors(run_dir))
    try:
        checks = audit(run_dir, is_running=is_running)
        if is_running:
            _keep_what_lasts(checks, audit(run_dir, is_running=True))
            print("the run goes on: what it has written so far is checked")
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for check in checks:
        print(check.summary)
    violations = [violation for check in checks for violation in check.violations]
    for violation in violations:
        print(f"violation: {violation}", file=sys.stderr)
    return 1 if violations else 0


def _keep_what_lasts(checks: Sequence[Check], later: Sequence[Check]) -> None:
    """Drop violations that a second audit does not find: files changed during the first one."""
    again = {violation for check in later for violation in check.violations}
    for check in checks:
        check.violations = [one for one in check.violations if one in again]
