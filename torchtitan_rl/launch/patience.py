"""When a life of a worker is given up; see `lives`.

| the life | is given up after |
|---|---|
| its controller was heard | 40 s without another beat |
| not yet, and the run that was lost before may look for it | 1 minute; 2, 4, 5, 5... in a row |
| not yet, and there is no such run | - |

The second row is for the controller that looks for this host and could not attach it here: it may
not be able to try again at the same address. A life that is being attached at this moment gets
a minute more.
"""

from __future__ import annotations

from collections.abc import Callable

from torchtitan_rl.launch.silence import CONTROLLER_LOST_S, Silence

UNUSED_S = 60.0
_MAX_UNUSED_S = 300.0
_ATTACHING_S = 60.0  # longer than any attempt of a controller


def unused_limit_s(num_unused: int, first_s: float = UNUSED_S) -> float:
    """How long a life that a lost run may look for waits, after so many that waited in vain.

    >>> [unused_limit_s(number) for number in range(5)]
    [60.0, 120.0, 240.0, 300.0, 300.0]
    """
    return min(first_s * 2.0 ** min(num_unused, 8), _MAX_UNUSED_S)


class Patience:
    """Of one life, which its worker looks at every half second.

    ``unused_s`` is how long it waits for its first beat; None: for as long as it takes.
    """

    def __init__(
        self, now_s: float, *, unused_s: float | None, silence_s: float = CONTROLLER_LOST_S
    ) -> None:
        self._silence = Silence(now_s)
        self._unused_s = unused_s
        self._silence_s = silence_s

    def look(self, now_s: float, heard: str, is_contacted: Callable[[], bool]) -> str:
        """Why the life is given up now; empty where it is not.

        Args:
            heard: differs for each beat of the controller; empty before the first.
            is_contacted: whether anything has a connection to this life.
        """
        silent_s = self._silence.look(now_s, heard)
        if heard:
            is_over = silent_s >= self._silence_s
            return f"nothing was heard from the controller for {silent_s:.0f} s" if is_over else ""
        if self._unused_s is None or silent_s < self._unused_s:
            return ""
        if silent_s < self._unused_s + _ATTACHING_S and is_contacted():
            return ""
        return f"the run that was lost did not come back for {silent_s:.0f} s"
