"""The pages for users: their commands and example files, as a reader copies them from there."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w/]+\.py)\b")  # the first line of a block that is a whole file
_PROGRAMS = ("torchtitan-rl ", "torchrun ", "python ", "hf ")


@dataclass(frozen=True, slots=True)
class Command:
    """``text`` is the command without prompt and comment; ``error`` is the error that the page
    shows below it."""

    text: str
    error: str

    @property
    def words(self) -> list[str]:
        """Its words, without redirections and without what makes it run in the background."""
        words = shlex.split(re.sub(r"\s*(>\s*\S+|&)\s*$", "", self.text))
        # What stands for any value, and the brackets of what may be left out.
        words = [word.removesuffix("...").strip("[]") for word in words]
        return [PLACEHOLDERS.get(word, word) for word in words]


PLACEHOLDERS = {
    "CONFIG": "alphabet_sort_tiny",
    "DIR": "package:calculator_agent",
    "MODEL_OR_RUN": "package:alphabet_sort",
}


def commands(page: str) -> list[Command]:
    """The commands in the page's blocks of code: lines after a prompt (``$``), else all lines of a
    block of bash, else lines that begin with the name of a program of ours."""
    found = []
    for _, language, block in _BLOCK.findall((ROOT / page).read_text()):
        if language in ("", "bash"):
            found += _commands_of(block, language)
    return found


def _commands_of(block: str, language: str) -> list[Command]:
    lines = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
    has_prompt = any(line.startswith("$ ") for line in lines)
    found: list[Command] = []
    for number, line in enumerate(lines):
        if has_prompt:
            is_command = line.startswith("$ ")
        else:
            is_command = language == "bash" or line.startswith(_PROGRAMS)
        if not is_command or not line or line.startswith("#"):
            continue
        text, after = line.removeprefix("$ "), lines[number + 1 :]
        while text.count("'") % 2:  # an argument of several lines
            text = f"{text}\n{after.pop(0)}"
        error = after[0] if after and after[0].startswith("error:") else ""
        found.append(Command(re.sub(r"\s+# .*", "", text), error))
    return found


def write_example_files(page: str, folder: Path) -> None:
    """Write each block of Python that begins with ``# NAME.py`` to that file."""
    for indent, language, block in _BLOCK.findall((ROOT / page).read_text()):
        name = _FILE.match(block.strip())
        if language == "python" and name:
            text = re.sub(f"^{indent}", "", block, flags=re.MULTILINE)
            (folder / name[1]).write_text(text)
