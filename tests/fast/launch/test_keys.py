"""``torchtitan-rl keys``, and the checks of what it writes."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from torchtitan_rl.commands.cli import main
from torchtitan_rl.errors import ConfigError
from torchtitan_rl.launch.keys import add, create, tls_environment

HOSTS = ("10.0.0.1", "node3,10.0.0.3", "fd00::2")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "keys"
    assert main(["keys", "--hosts", *HOSTS, "--output", str(folder), "--days", "30"]) == 0
    return folder


def errors_of(keys: Path, **arguments: object) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        tls_environment(keys, **arguments)  # type: ignore[arg-type]
    return refused.value.errors


def test_each_host_gets_a_folder_and_private_keys_are_their_owners(keys: Path) -> None:
    files = sorted(str(path.relative_to(keys)) for path in keys.rglob("*.pem"))
    assert files == sorted(
        ["ca.pem", "ca-key.pem"]
        + [
            f"{host}/{f}.pem"
            for host in ("10.0.0.1", "node3", "fd00--2")
            for f in ("ca", "cert", "key")
        ]
    )
    for path in keys.rglob("*key.pem"):
        assert path.stat().st_mode & 0o777 == 0o600
    assert keys.stat().st_mode & 0o777 == 0o700


def test_a_hosts_folder_gives_monarchs_variables(keys: Path) -> None:
    folder = keys / "node3"
    expected = {
        "HYPERACTOR_TLS_CERT": str(folder / "cert.pem"),
        "HYPERACTOR_TLS_KEY": str(folder / "key.pem"),
        "HYPERACTOR_TLS_CA": str(folder / "ca.pem"),
    }
    assert tls_environment(folder) == expected
    assert tls_environment(folder, host="10.0.0.3") == expected
    assert tls_environment(keys, host="NODE3") == expected  # one folder for all


def test_keys_are_not_overwritten_and_later_hosts_get_theirs(keys: Path) -> None:
    with pytest.raises(ConfigError, match="exists; give another, or --add"):
        create(keys, ["10.0.0.9"], days=30)
    assert main(["keys", "--add", "10.0.0.4", "--output", str(keys)]) == 0
    assert tls_environment(keys, host="10.0.0.4")
    with pytest.raises(ConfigError, match=r"10.0.0.4 exists"):
        add(keys, ["10.0.0.4"], days=30)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--hosts: give the machines"),
        (["--hosts", "a", "--add", "b"], "--hosts: give the machines"),
        (["--hosts", "10.0.0.300"], "--hosts is '10.0.0.300': "),
        (["--hosts", "0.0.0.0"], "--hosts is '0.0.0.0': give the address of one interface"),
        (["--hosts", "a", "A"], "--hosts has a more than once"),
        (["--hosts", "a,"], "--hosts is ''"),
        (["--hosts", "../x"], "--hosts is '../x'"),
        (["--hosts", "a", "--days", "0"], "--days is 0: give 2 to 3650"),
        (["--hosts", "a", "--output", "/proc/none/keys"], "it cannot be written"),
        (["--add", "a", "--output", "/proc/none/keys"], "keys cannot be added there"),
        (["--add", "../x"], "--add is '../x': give a host's name or IP address"),
        (["--hots", "a"], "--hots"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = [] if "--output" in options else ["--output", str(tmp_path / "keys")]
    assert main(["keys", *options, *output]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "keys").exists()


def test_a_missing_folder_and_a_folder_of_all_hosts_are_named(keys: Path, tmp_path: Path) -> None:
    (error,) = errors_of(tmp_path / "none", field="--keys")
    assert error.startswith(f"--keys is {tmp_path / 'none'}: there is no such folder")
    (error,) = errors_of(keys, host="10.9.9.9")
    assert "has no cert.pem, key.pem; give the folder of this host (10.0.0.1, " in error


def test_a_key_that_others_can_read_is_refused(keys: Path) -> None:
    key = keys / "node3" / "key.pem"
    key.chmod(0o644)
    try:
        (error,) = errors_of(keys / "node3")
    finally:
        key.chmod(0o600)
    assert f"can be read by others; `chmod 600 {key}`" in error


def test_a_certificate_for_another_host_is_refused_with_both_names(keys: Path) -> None:
    (error,) = errors_of(keys / "node3", host="10.0.0.1")
    assert "is for node3, 10.0.0.3, and this host is 10.0.0.1" in error


@pytest.mark.parametrize(
    ("days", "message"),
    [(31, "expired at"), (29.5, "expires at"), (-2, "set this host's clock")],
)
def test_certificates_out_of_their_time_are_refused(keys: Path, days: float, message: str) -> None:
    errors = errors_of(keys / "node3", now=datetime.now(UTC) + timedelta(days=days))
    assert len(errors) == 2  # the authority's too
    assert all(message in error for error in errors)


def test_files_that_do_not_belong_together_are_refused(keys: Path, tmp_path: Path) -> None:
    create(tmp_path / "other", ["10.0.0.1"], days=30)
    folder = tmp_path / "mixed"
    folder.mkdir()
    for name, source in {"cert": keys, "key": tmp_path / "other", "ca": tmp_path / "other"}.items():
        (folder / f"{name}.pem").write_bytes((source / "10.0.0.1" / f"{name}.pem").read_bytes())
        os.chmod(folder / f"{name}.pem", 0o600)
    not_key, not_authority = errors_of(folder)
    assert "key.pem is not the key of cert.pem" in not_key
    assert "cert.pem is not from this ca.pem" in not_authority
    (folder / "cert.pem").write_text("nothing")
    (error,) = errors_of(folder)
    assert "is not in PEM form" in error
