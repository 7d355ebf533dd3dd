"""The wheel, installed without the repository: it carries the ready configurations and their tasks,
adds no other package to the user's environment, and trains from any directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.real.runs import ONE_REPLICA, ROOT, SMALL, TIMEOUT_S, read_metrics, require_audit

SOURCES = (
    "torchtitan_rl",
    "experiments",
    "configs",
    "docs",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)


def run(*words: str | Path, cwd: Path) -> str:
    """The command's output, of which nothing is taken from the repository."""
    unset = ("PYTHONPATH", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=inherited,
        timeout=TIMEOUT_S,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that the build leaves nothing in the repository and takes nothing old
    from it."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", "dist", ".", cwd=copy)
    (wheel,) = (copy / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def bin_dir(wheel, tmp_path_factory) -> Path:
    """Programs of a new environment with the wheel in it, and the libraries of this one."""
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, symlinks=True)
    site_packages = sysconfig.get_path("purelib", vars={"base": str(root)})
    # A path in a .pth file is searched, but its own .pth files, such as the one by which this
    # environment finds the repository, are not read.
    (Path(site_packages) / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", root)
    run(*pip, "install", "--no-deps", "--no-index", "--ignore-installed", wheel, cwd=root)
    return root / "bin"


def test_the_wheel_adds_one_package_and_has_the_policies(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].removesuffix(".dist-info") for name in names} == {
        "torchtitan_rl",
        "-".join(wheel.name.split("-")[:2]),
    }
    for folder in ("configs", "experiments"):
        tracked = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
        assert tracked <= {name.removeprefix("torchtitan_rl/") for name in names}
    assert "torchtitan_rl/experiments/alphabet_sort/policy/model.safetensors" in names
    assert "torchtitan_rl/observability/metrics.md" in names  # a link to docs/


def test_the_installed_package_is_the_wheels(bin_dir, tmp_path):
    where = run(
        bin_dir / "python", "-c", "import torchtitan_rl; print(torchtitan_rl.__file__)",
        cwd=tmp_path,
    )  # fmt: skip
    assert Path(where.strip()).is_relative_to(bin_dir.parent)


def test_a_ready_configuration_is_found_by_its_name(bin_dir, tmp_path):
    plan = run(
        bin_dir / "torchtitan-rl", "train", "calculator_agent_tiny", "--dry-run", cwd=tmp_path
    )
    assert "calculator_agent_tiny" in plan
    assert str(ROOT) not in plan
    assert list(tmp_path.iterdir()) == []


def test_a_copied_configuration_runs(bin_dir, wheel, tmp_path):
    text = zipfile.ZipFile(wheel).read("torchtitan_rl/configs/alphabet_sort_tiny.py")
    (tmp_path / "mine.py").write_bytes(text)
    assert "policy" in run(bin_dir / "torchtitan-rl", "train", "mine.py", "--dry-run", cwd=tmp_path)


@pytest.mark.soak
def test_two_steps_from_the_wheel_in_another_directory(bin_dir, tmp_path):
    run(
        bin_dir / "torchtitan-rl", "train", "alphabet_sort_tiny", *SMALL, *ONE_REPLICA,
        *("--num-steps", "2"), cwd=tmp_path,
    )  # fmt: skip
    run_dir = tmp_path / "outputs" / "alphabet_sort_tiny"
    assert [row["step"] for row in read_metrics(run_dir)] == [0, 1, 2]
    assert (run_dir / "policy" / "model.safetensors").is_file()
    require_audit(run_dir)
