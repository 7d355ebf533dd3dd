"""The page that ships is what its sources give. Where npm or its registry is missing, the tests are
skipped, and say so."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WEB = ROOT / "web"
SHIPPED = ROOT / "torchtitan_rl" / "page" / "static"


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of web/ with its packages, which are kept for the next time."""
    if not shutil.which("npm"):
        pytest.skip("the page's bundle is NOT checked: npm is not installed")
    folder = tmp_path_factory.mktemp("page") / "web"
    shutil.copytree(WEB, folder, ignore=shutil.ignore_patterns("node_modules"))
    packages = (WEB / "package.json").read_bytes()
    digest = hashlib.sha256(packages).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "torchtitan-rl"
    cache = caches / f"page-{digest}"
    if not cache.exists():
        caches.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=caches))
        (new / "package.json").write_bytes(packages)
        found = _run(["npm", "install", "--no-package-lock", "--no-audit", "--no-fund"], new)
        if found.returncode:
            shutil.rmtree(new)
            pytest.skip(f"the page's bundle is NOT checked: npm says {found.stderr[-300:]}")
        new.rename(cache)
    (folder / "node_modules").symlink_to(cache / "node_modules")
    return folder


def test_the_types_of_the_page_are_sound(web: Path) -> None:
    found = _run(["npm", "run", "--silent", "check"], web)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_shipped_page_is_built_from_its_sources(web: Path, tmp_path: Path) -> None:
    found = _run(["node", "build.mjs", str(tmp_path)], web)
    assert found.returncode == 0, found.stderr
    built = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shipped = {path.name: path.read_bytes() for path in SHIPPED.iterdir()}
    assert built == shipped, "web/ has changed: build it with `make page`"


def test_the_license_of_uplot_ships() -> None:
    script = (SHIPPED / "app.js").read_text()
    assert "Leon Sorokin" in script
    assert "Permission is hereby granted" in script


def test_no_source_writes_text_as_html() -> None:
    for path in WEB.rglob("src/*.ts"):
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in path.read_text(), f"{path.name}: {word}"


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
