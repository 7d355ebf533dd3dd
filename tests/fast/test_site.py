"""The documentation site: it is built without a warning, so all links and anchors lead somewhere,
and a reader's browser asks no other host for anything."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import torchtitan_rl
from tests.fast.config.test_documented_options import fields
from torchtitan_rl.commands.cli import COMMANDS
from torchtitan_rl.config.run import RunConfig

ROOT = Path(__file__).parents[2]
ELSEWHERE = re.compile(r"(^|['\"(\s])(https?:)?//")
LOADED_BY_CSS = re.compile(
    r"@import[^;]*|url\((?!['\"]?data:)[^)]*\)|href=\"[^\"]*\""
)  # and by SVG
PACKAGES = ("material", "mkdocstrings_handlers")

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in PACKAGES),
    reason="THE DOCUMENTATION SITE IS NOT TESTED: pip install 'torchtitan-rl[docs]'",
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Loaded(HTMLParser):
    """The addresses that a browser asks for when it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        names = ("src", "srcset", "data", "poster") if tag != "link" else ("href",)
        if tag == "link" and found.get("rel") == "canonical":
            return
        self.addresses += [value for name in names if (value := found.get(name))]
        self.addresses += LOADED_BY_CSS.findall(found.get("style") or "")


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        text = page.read_text()
        parser = Loaded()
        parser.feed(text)
        css = "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL))
        found = [*parser.addresses, *LOADED_BY_CSS.findall(css)]
        assert [address for address in found if ELSEWHERE.search(address)] == [], page.name


def test_no_style_or_picture_loads_anything_from_another_host(site: Path) -> None:
    files = [*site.rglob("*.css"), *site.rglob("*.svg")]
    assert len(files) > 2
    for file in files:
        found = LOADED_BY_CSS.findall(file.read_text())
        assert [address for address in found if ELSEWHERE.search(address)] == [], file.name


def test_the_references_are_complete(site: Path) -> None:
    api, configuration, commands = (
        (site / f"{page}.html").read_text() for page in ("api", "configuration", "commands")
    )
    assert [name for name in torchtitan_rl.__all__ if f'.{name}"' not in api] == []
    assert "<blockquote>" not in api  # examples are code
    sections = {name.rpartition(".")[0] for name in fields(RunConfig)}
    options = fields(RunConfig) - sections - {"policy"}
    assert [name for name in options if f"<code>{name}</code>" not in configuration] == []
    assert [name for name in COMMANDS if f">{name}<a" not in commands] == []


def test_no_item_of_a_list_became_text(site: Path) -> None:
    for page in site.glob("*.html"):
        assert re.findall(r"<p>[^<]*\n(?:-|\d+\.) .*", page.read_text()) == [], page.name
