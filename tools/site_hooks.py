"""Hooks of the documentation site (`mkdocs.yml`): they add the pages that are not in ``docs/``.

- README.md, CONTRIBUTING.md and CHANGELOG.md become pages. Links to them, and theirs to ``docs/``,
  become links between pages.
- Other files of the repository to which a page links (pictures, scripts) are copied to ``files/``.
- Three references are written from the code: the configuration, from its dataclasses; the commands,
  from their ``--help``; the Python API, from the names that `torchtitan_rl` exports.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
import textwrap
import typing
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import griffe
from markdown import Extension, Markdown
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
EXAMPLE = re.compile(r"^>>> .*?(?=\n\n(?!\.\.\.|>>>)|\Z)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")  # without its anchor
ITEM = re.compile(r"([-*]|\d+\.) ")
PACKAGE = "torchtitan_rl"
INTRODUCTION = """# Configuration

These are all fields of `RunConfig`. In Python a section is a dataclass, such as
`RunConfig(..., trainer=TrainerConfig(threads=2))`. On the command line every field is an option,
with `-` in place of `_`: `--trainer.threads 2`. A field that is `True` or `False` has two options:
`--trainer.share-prefixes` and `--trainer.no-share-prefixes`. The fields of `task` are those of the
task's class, see the [Python API](api.md#ready-tasks). `torchtitan-rl train CONFIG --dry-run`
checks all values.
"""
THEMES = {
    "config": "Configuration of a run",
    "rollout": "Tasks, environments and rewards",
    "environments": "Ready tasks",
    "data": "Datasets",
    "agents": "Agents",
    "sandbox": "Programs in a sandbox",
    "training": "Training and losses",
    "backends": "The trainer",
    "types": "Data types",
    "errors": "Errors",
}
"""Sections of the Python API: for the first word of a name's module, the section's title. All other
modules have only sections of the configuration."""


class ShortIndent(Extension):
    """Parses what belongs to an item of a list from two columns of indent on, as other programs do;
    the default is four. It must be the first extension, for it builds the parser again."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.tab_length = 2
        md.build_parser()


class Docstrings(griffe.Extension):
    """Marks the examples of docstrings as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            text = obj.docstring.value.replace("::\n", ":\n")
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", text)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.insert(0, ShortIndent())
    names = (path.name for path in (ROOT / "docs").glob("*.md"))
    if more := sorted(name for name in names if name not in str(config.nav)):
        config.nav.append({"More": more})  # new pages, until `mkdocs.yml` names them
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    written = {page: (ROOT / source).read_text() for source, page in PAGES.items()}
    written |= {"configuration.md": configuration(), "commands.md": commands(), "api.md": api()}
    for name, content in written.items():
        files.append(File.generated(config, name, content=content))
    copied = {
        file
        for page in files.documentation_pages()
        for link in LINK.findall(page.content_string)
        if (file := source_of(page.src_uri).parent / link).is_file() and place(file)[:6] == "files/"
    }
    for name, file in sorted({place(file): file for file in copied}.items()):
        files.append(File.generated(config, name, abs_src_path=str(file.resolve())))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the page's links lead to where their targets are on the site."""
    uri = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        target = source_of(uri).parent / link[1]
        return os.path.relpath(place(target), Path(uri).parent) if target.is_file() else link[1]

    return LINK.sub(moved, separate_items(markdown))


def separate_items(markdown: str) -> str:
    """Add an empty line between the second paragraph of an item and the next item: without it this
    parser takes the next item for text of the paragraph."""
    lines: list[str] = []
    is_code = is_later_paragraph = False
    for line in markdown.splitlines():
        is_fence = line.lstrip().startswith("```")
        if not is_code and (not lines or not lines[-1].strip() or is_fence):
            is_later_paragraph = line.startswith(" ")
        if not is_code and is_later_paragraph and ITEM.match(line):
            lines.append("")
            is_later_paragraph = False
        is_code ^= is_fence
        lines.append(line)
    return "\n".join(lines)


def source_of(uri: str) -> Path:
    """The file in the repository that the page ``uri`` is made of."""
    (source,) = [name for name, page in PAGES.items() if page == uri] or [f"docs/{uri}"]
    return ROOT / source


def place(file: Path) -> str:
    """Where a file of the repository is on the site."""
    name = Path(os.path.abspath(file)).relative_to(ROOT).as_posix()
    return PAGES.get(name) or (name[5:] if name.startswith("docs/") else f"files/{name}")


def configuration() -> str:
    """The page with every field of `RunConfig`."""
    run = importlib.import_module(f"{PACKAGE}.config.run").RunConfig
    return "\n".join([INTRODUCTION, *section(run, "", "RunConfig")])


def section(kind: type, prefix: str, title: str) -> Iterator[str]:
    """A heading and a table of the fields of ``kind``, then its sections."""
    yield from ("", f"## {title}", "", paragraph(inspect.cleandoc(kind.__doc__ or "")), "")
    yield from ("| field | values | default | meaning |", "|---|---|---|---|")
    types, texts = typing.get_type_hints(kind), field_docstrings(kind)
    sections = {
        f.name: types[f.name] for f in dataclasses.fields(kind) if is_section(types[f.name])
    }
    for field in dataclasses.fields(kind):
        if field.name in sections:
            continue
        given = field.default
        default = "required" if given is dataclasses.MISSING else f"`{shown(given)}`"
        name = f"`{prefix}{field.name}`"
        text = " ".join(texts.get(field.name, "").split()).replace("|", "\\|")
        yield f"| {name} | {values(types[field.name])} | {default} | {paragraph(text)} |"
    for name, inner in sections.items():
        title = f"{prefix}{name}: `{inner.__name__}`"
        yield from section(inner, f"{prefix}{name}.", title)


def is_section(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) and kind.__name__ != "Task"


def field_docstrings(kind: type) -> dict[str, str]:
    """The text after each field in the source of ``kind``."""
    (defined,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(defined, ast.ClassDef)
    found = {}
    for field, after in zip(defined.body, defined.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            found[ast.unparse(field.target)] = ast.literal_eval(after.value)
    return found


def values(kind: Any) -> str:
    """What may be given for a field, in words."""
    if typing.get_origin(kind) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    names = {int: "integer", float: "number", str: "text", bool: "`True`, `False`", Path: "path"}
    if kind in names:
        return names[kind]
    parts = [values(one) for one in typing.get_args(kind) if one is not Ellipsis]
    if typing.get_origin(kind) is tuple:
        return f"tuple of: {', '.join(dict.fromkeys(parts))}"
    if parts and type(None) in typing.get_args(kind):
        return ", ".join(part for part in parts if part != "NoneType") + ", or `None`"
    return ", ".join(parts) or f"`{getattr(kind, '__name__', kind)}`"


def shown(value: Any) -> str:
    return str(value) if isinstance(value, str | Path) and str(value) else repr(value)


def paragraph(text: str) -> str:
    """``text`` with the double backquotes of docstrings as those of Markdown."""
    return re.sub(r"``([^`]+)``", r"`\1`", text.replace("::\n", ":\n"))


def commands() -> str:
    """The page with the ``--help`` of each command."""
    from torchtitan_rl.commands.cli import COMMANDS, main

    os.environ["COLUMNS"] = "100"
    lines = ["# Commands", "", "What `--help` prints. [Configuration](configuration.md) lists the"]
    lines += ["options that `train CONFIG` has in addition."]
    for command, (_, what, _) in COMMANDS.items():
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            main([*command.split(), "--help"])
        text = printed.getvalue().replace(str(ROOT), ".")
        lines += ["", f"## {command}", "", what.capitalize(), "", "```text", text.rstrip(), "```"]
    return "\n".join(lines)


def api() -> str:
    """The page with every name that the package exports, by theme."""
    package = importlib.import_module(PACKAGE)
    homes = {name: home.removeprefix(f"{PACKAGE}.") for name, home in package._HOMES.items()}

    def theme(name: str) -> int:
        first = homes[name].split(".")[0]
        is_config = name.endswith("Config") and first not in ("sandbox", "environments", "data")
        return list(THEMES).index("config" if is_config or first not in THEMES else first)

    lines = ["# Python API", "", paragraph(inspect.cleandoc(package.__doc__))]
    for number, names in groupby(sorted(homes, key=lambda name: (theme(name), name)), key=theme):
        lines += ["", f"## {list(THEMES.values())[number]}"]
        for name in names:
            lines += ["", f"::: {PACKAGE}.{homes[name]}.{name}"]
            if not theme(name):  # its fields are on the page of the configuration
                lines += ["    options:", "      members: false"]
                lines += ["      merge_init_into_class: false"]
    return "\n".join(lines)
