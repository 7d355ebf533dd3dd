"""Replaces a C function in what one loaded library calls: `replace_call`.

A shared library calls the functions of others through a table of its own, its global offset table,
which the loader has filled in. Another address there changes what this library calls, and nothing
else in the process. Linux on 64-bit machines, whose format this reads:
https://refspecs.linuxfoundation.org/elf/gabi4+/ch5.dynamic.html
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from typing import Any

_END, _STRINGS, _SYMBOLS = 0, 5, 6  # tags of the dynamic section
_TABLES = ((7, 8), (23, 2))  # of relocations: address and size
_NUM_WITHOUT_SYMBOL = 0x6FFFFFF9  # how many at the beginning of the first one have none
_SYMBOL_BYTES = _RELOCATION_BYTES = 24
_READ_WRITE = 3  # mprotect(2)
_Word = ctypes.c_size_t

libc: Any = ctypes.CDLL(None, use_errno=True)


def replace_call(library: str, name: str, function: Any) -> Callable[[], None]:
    """Have a library call ``function``, made with `ctypes.CFUNCTYPE`, instead of the C function
    ``name``; returns what undoes it.

    Raises:
        OSError: there is no such library, it calls no such function, or its table cannot be
            written.
    """
    slots = list(_slots(ctypes.CDLL(library), name.encode()))
    if not slots:
        raise OSError(f"{library} does not call {name}")
    before = [slot.value for slot in slots]
    for slot in slots:
        page = ctypes.addressof(slot) & -mmap.PAGESIZE
        if libc.mprotect(ctypes.c_void_p(page), _Word(mmap.PAGESIZE), _READ_WRITE) != 0:
            raise OSError(ctypes.get_errno(), f"the calls of {library} cannot be replaced")
        slot.value = ctypes.cast(function, ctypes.c_void_p).value or 0
    _kept.append(function)  # which native code may call from now on

    def undo() -> None:
        for slot, address in zip(slots, before, strict=True):
            slot.value = address

    return undo


_kept: list[Any] = []


def _slots(library: ctypes.CDLL, name: bytes) -> Iterator[Any]:
    """The places in the tables of a library that hold the address of a function."""
    base, _, section = (_Word * 3).from_address(library._handle)  # glibc's struct link_map
    dynamic = dict(_entries(section))
    for number, (table, size) in enumerate(_TABLES):
        relocations = range(0, dynamic.get(size, 0), _RELOCATION_BYTES)
        for place in relocations[0 if number else dynamic.get(_NUM_WITHOUT_SYMBOL, 0) :]:
            relocation = dynamic[table] + place
            offset, info = (_Word * 2).from_address(relocation)
            symbol = dynamic[_SYMBOLS] + _SYMBOL_BYTES * (info >> 32)
            name_offset = ctypes.c_uint32.from_address(symbol).value
            if name_offset and ctypes.string_at(dynamic[_STRINGS] + name_offset) == name:
                yield _Word.from_address(base + offset)


def _entries(section: int) -> Iterator[tuple[int, int]]:
    while True:
        tag, value = (_Word * 2).from_address(section)
        if tag == _END:
            return
        yield tag, value
        section += 2 * ctypes.sizeof(_Word)
