from __future__ import annotations

import socket
from pathlib import Path

import pytest

from torchtitan_rl.commands.cli import main
from torchtitan_rl.serving.config import (
    EndpointConfig,
    Keys,
    endpoint_errors,
    known_parsers,
)

POLICY = str(Path(__file__).parents[3] / "experiments" / "alphabet_sort" / "policy")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHTITAN_RL_API_KEY", raising=False)
    monkeypatch.delenv("TORCHTITAN_RL_ADMIN_KEY", raising=False)


def test_a_dry_run_prints_processes_and_address_but_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTITAN_RL_API_KEY", "wXyZ-secret")
    log_dir = str(tmp_path / "logs")
    options = ["--generator.replicas", "3", "--endpoint.port", "0", "--log-dir", log_dir]
    assert main(["serve", POLICY, "--dry-run", *options]) == 0
    printed = capsys.readouterr().out
    assert "replica2: 1 process on" in printed
    assert "endpoint: 1 process on" in printed
    assert "API key: set, admin key: none" in printed
    assert "secret" not in printed
    assert list(tmp_path.iterdir()) == []


def test_every_error_is_printed_and_nothing_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHTITAN_RL_ADMIN_KEY", "a:b")
    wrong = [
        "--generator.replicas", "0",
        "--generator.request-timeout-s", "0",
        "--endpoint.max-n", "0",
    ]  # fmt: skip
    options = [
        "--generator.max-model-len", "100000",
        "--endpoint.host", "0.0.0.0",
        "--endpoint.port", "0",
        "--endpoint.chat-template", "nowhere.jinja",
        "--endpoint.tool-call-parser", "hermess",
        "--endpoint.reasoning-parser", "none",
        "--episodes-file", str(tmp_path),
        "--log-dir", str(tmp_path / "logs"),
    ]  # fmt: skip

    def named(*words: str) -> list[str]:
        assert main(["serve", POLICY, *words]) == 2
        lines = capsys.readouterr().err.splitlines()
        return [line.removeprefix("error: ").split(" ")[0] for line in lines]

    assert named(*wrong, *options) == [
        "generator.replicas",
        "generator.request_timeout_s",
        "endpoint.max_n",
    ]
    assert named(*options) == [
        "generator.max_model_len",
        "endpoint.chat_template",
        "endpoint.tool_call_parser",
        "endpoint.reasoning_parser",
        "endpoint.host",
        "TORCHTITAN_RL_ADMIN_KEY",
        "episodes_file",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_parsers_that_vllm_has_are_known_without_importing_it() -> None:
    assert "hermes" in known_parsers("tool_call_parser")
    assert "qwen3" in known_parsers("reasoning_parser")
    assert endpoint_errors(EndpointConfig(tool_call_parser="hermes"), Keys()) == []
    (message,) = endpoint_errors(EndpointConfig(tool_call_parser="hermess"), Keys())
    assert "hermes, " in message


@pytest.mark.parametrize(
    ("template", "is_wrong"),
    [
        (b"{% for m in messages %}{{ m.content }}", True),
        (b"{% no_such_tag %}", True),
        (b"\xff\xfe", True),
        (
            b"{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% endfor %}",
            False,
        ),
    ],
)
def test_a_chat_template_that_cannot_be_compiled_is_an_error(
    template: bytes, is_wrong: bool, tmp_path: Path
) -> None:
    path = tmp_path / "template.jinja"
    path.write_bytes(template)
    errors = endpoint_errors(EndpointConfig(chat_template=str(path)), Keys())
    assert [message.split(" ")[0] for message in errors] == ["endpoint.chat_template"] * is_wrong


def test_a_taken_port_and_a_strange_address_are_errors() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (message,) = endpoint_errors(EndpointConfig(port=port), Keys())
        assert f"endpoint.port {port}" in message
    (message,) = endpoint_errors(EndpointConfig(host="192.0.2.1"), Keys(api="key"))
    assert "endpoint.host is 192.0.2.1" in message


def test_an_address_that_others_reach_needs_a_key() -> None:
    (message,) = endpoint_errors(EndpointConfig(host="0.0.0.0"), Keys())
    assert "TORCHTITAN_RL_API_KEY" in message
    assert endpoint_errors(EndpointConfig(host="0.0.0.0"), Keys(api="key")) == []


def test_a_key_with_a_colon_is_refused_for_a_session_follows_it() -> None:
    for keys in (Keys(api="a:b"), Keys(admin="a:b")):
        (message,) = endpoint_errors(EndpointConfig(), keys)
        assert '":"' in message
