"""The documentation for developers names only files, classes and functions that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.documentation import PAGES
from torchtitan_rl.observability.sinks import check_names

ROOT = Path(__file__).parents[2]
METRIC = re.compile(r"(train|trainer|tokens|account|overlap|controller|sync|time|engine)/[\w/]+")


def quoted(page: str) -> set[str]:
    """What a page has in single backquotes outside of code blocks."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"`([^`\n]+)`", text))


@cache
def defined_names() -> set[str]:
    """``Class``, ``function``, ``Class.method`` and ``Class.FIELD`` of package and repository."""
    names = set()
    for folder in ("torchtitan_rl", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(path.read_text()).body:
                names |= _names_of(node)
                if isinstance(node, ast.ClassDef):
                    names |= {f"{node.name}.{name}" for one in node.body for name in _names_of(one)}
    return names


def _names_of(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return {node.target.id}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()


def pages_without(*names: str) -> list[str]:
    """All pages but those of ``docs/`` that speak of other things in the same notation."""
    return [page for page in PAGES if page not in {f"docs/{name}.md" for name in names}]


def test_the_main_path_is_12_files_of_less_than_4300_lines_together():
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.split("## The main path in files")[1].split("\n#")[0]
    files = re.findall(r"^\d+\. `(?:torchtitan_rl/)?([\w./]+)`", section, re.MULTILINE)
    sizes = [len((ROOT / "torchtitan_rl" / file).read_text().splitlines()) for file in files]
    assert len(sizes) == 12
    assert sum(sizes) < 4300


# Pages with files of a run, or prefixes of metrics.
@pytest.mark.parametrize("page", pages_without("training", "metrics", "security"))
def test_every_file_that_is_named_exists(page):
    files = {name for name in quoted(page) if re.fullmatch(r"[\w./-]+(/|\.(py|md|toml|sh))", name)}
    missing = {
        name
        for name in files
        if not name.startswith("outputs/")
        and not any((ROOT / base / name).exists() for base in (".", "torchtitan_rl", "docs"))
    }
    assert missing == set()


# Pages with classes of other libraries, or hosts.
@pytest.mark.parametrize("page", pages_without("performance", "security", "coming_from"))
def test_every_class_that_is_named_exists(page):
    named = {
        name.removesuffix("()")
        for name in quoted(page)
        if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*(\.\w+)?(\(\))?", name)
    }
    in_examples = set(re.findall(r"^class (\w+)", (ROOT / page).read_text(), re.M))
    assert named - defined_names() - in_examples == set()


@pytest.mark.parametrize("page", pages_without("metrics"))
def test_every_metric_that_is_named_exists(page):
    check_names(name for name in quoted(page) if METRIC.fullmatch(name))


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_file_or_heading_leads_somewhere(page):
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)]+)\)", (ROOT / page).read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = folder / name if name else ROOT / page
        assert file.exists(), target
        headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if anchor else []
        slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, target
