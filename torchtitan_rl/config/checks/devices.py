"""Which CUDA devices a process may use, named so that its children can be given some of them.

CUDA counts the devices of ``CUDA_VISIBLE_DEVICES`` from 0 in each process. A child whose mask is to
be one of its parent's devices therefore needs that device's own name: the parent's mask, entry by
entry, or the plain index where the parent has no mask.
"""

from __future__ import annotations

import re

VARIABLE = "CUDA_VISIBLE_DEVICES"
MIG = "MIG-"
_INDEX = re.compile(
    r"[ \t\n\v\f\r]*\+?(?P<digits>\d+)"
)  # as C reads a number: what follows is left


def visible_devices(mask: str | None, *, num_visible: int) -> tuple[str, ...]:
    """The names of the devices that a process with this mask sees, in its order.

    Args:
        mask: the value of ``CUDA_VISIBLE_DEVICES``; None where it is not set.
        num_visible: how many devices CUDA reports to that process, which settles what the mask
            alone does not say: whether an index or UUID exists. (It reports no more than one MIG
            instance to a process; each child may be given another.)

    >>> visible_devices(None, num_visible=2)
    ('0', '1')
    >>> visible_devices("4,5", num_visible=2)
    ('4', '5')
    >>> visible_devices("4,-1,5", num_visible=1)
    ('4',)
    """
    if mask is None:
        return tuple(str(index) for index in range(num_visible))
    names = named_devices(mask)
    if num_visible and names and names[0].startswith(MIG):
        return names
    return names[:num_visible]


def named_devices(mask: str) -> tuple[str, ...]:
    """The entries of a mask up to the first one that names no device, as CUDA reads them.

    An index may be followed by other characters, which CUDA ignores. The first entry says whether
    all are indices, ``GPU-`` UUIDs (or beginnings of them) or ``MIG-`` names; another kind ends the
    list. A device that is named twice makes the whole mask invalid: none is visible.
    """
    kind: str | None = None
    names: list[str] = []
    for entry in mask.split(","):
        found, name = _read_entry(entry)
        if found is None or (kind is not None and found != kind):
            break
        kind = found
        if name in names:
            return ()
        names.append(name)
    return tuple(names)


def _read_entry(entry: str) -> tuple[str | None, str]:
    """The kind of an entry (None: it names no device), and the name to pass on."""
    text = entry.strip()
    for prefix in ("GPU-", MIG):
        if text.startswith(prefix):
            return prefix, text
    index = _INDEX.match(entry)
    return ("index", str(int(index["digits"]))) if index else (None, "")
