"""The Makefile with the real `tools/setup.sh` and a Python that only notes what it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in *"$FAILS"*) [ -z "$FAILS" ] || exit 1;; esac
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "tools/setup.sh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def make(project: Path, *words: str, fails: str = "") -> subprocess.CompletedProcess[str]:
    names = ("ACCELERATOR", "MAKEFLAGS", "MAKELEVEL", "VENV")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"LOG": str(project / "log"), "FAILS": fails}
    return subprocess.run(
        ["make", f"PYTHON={project / 'python'}", *words],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
    )


def installed(project: Path) -> list[str]:
    """The extras that were installed since the last call."""
    log = project / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [line.rpartition(" ")[2] for line in lines if "--editable" in line]


def test_an_environment_for_cuda_is_used_by_later_commands_without_asking(project: Path) -> None:
    assert make(project, "setup", "ACCELERATOR=cuda").returncode == 0
    assert installed(project) == [".[cuda,smollm2,tasks,dev]"]
    (project / "tests" / "gpu").mkdir(parents=True)
    assert "setup.sh" not in make(project, "-n", "demo").stdout
    tests = make(project, "-n", "test").stdout
    assert "tests/fast" in tests
    assert "pytest tests/gpu" in tests
    assert "tests/real" not in tests
    (project / "pyproject.toml").touch()
    assert make(project, "setup").returncode == 0
    assert installed(project) == [".[cuda,smollm2,tasks,dev]"]


def test_packages_for_another_accelerator_are_never_installed_over_them(project: Path) -> None:
    assert make(project, "setup", "ACCELERATOR=cuda").returncode == 0
    installed(project)
    for target in ("setup", "demo", "test"):
        refused = make(project, target, "ACCELERATOR=cpu")
        assert refused.returncode != 0
        (line,) = (line for line in refused.stderr.splitlines() if "make: ***" not in line)
        assert line == (
            ".venv holds the packages for cuda, and ACCELERATOR is cpu: leave ACCELERATOR out, or "
            "remove .venv"
        )
    assert installed(project) == []
    shutil.rmtree(project / ".venv")
    assert make(project, "setup").returncode == 0
    assert installed(project) == [".[cpu,smollm2,tasks,dev]"]


def test_an_installation_that_failed_is_repeated_for_the_same_accelerator(project: Path) -> None:
    assert make(project, "setup", "ACCELERATOR=cuda", fails=".[cuda").returncode != 0
    installed(project)
    assert make(project, "setup", "ACCELERATOR=cpu").returncode != 0
    assert installed(project) == []
    assert make(project, "setup").returncode == 0
    assert installed(project) == [".[cuda,smollm2,tasks,dev]"]


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_an_environment_with_the_stamp_of_an_earlier_makefile_is_refused(
    project: Path, accelerator: str
) -> None:
    stamp = project / ".venv" / f".installed-{accelerator}"
    stamp.parent.mkdir()
    stamp.touch()
    for target in ("setup", "demo", "test"):
        refused = make(project, target)
        assert refused.returncode != 0
        (line,) = (line for line in refused.stderr.splitlines() if "make: ***" not in line)
        assert line == (
            ".venv was made by an earlier version of this Makefile "
            f"(.venv/.installed-{accelerator}): remove .venv"
        )
    assert installed(project) == []


def test_without_an_environment_everything_is_for_the_cpu(project: Path) -> None:
    planned = make(project, "-n", "test").stdout
    assert "setup.sh .venv cpu" in planned
    assert "tests/real tests/browser tests/fast" in planned
    wrong = make(project, "setup", "ACCELERATOR=tpu")
    assert wrong.returncode != 0
    assert "ACCELERATOR is 'tpu': give cpu or cuda" in wrong.stderr
    assert not (project / ".venv").exists()
