"""What `torchtitan-rl launch-script` prints is what the schedulers take: checked by their schemas,
by shells, and by running the scripts with small stand-ins for srun, ssh and torchrun."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml

from torchtitan_rl.commands.cli import main

ROOT = Path(__file__).parents[3]
GPUS = "alphabet_sort_qwen3_0_6b"
TINY = "alphabet_sort_tiny"
KUBERNETES = "1.37"

# What sbatch takes, of what the scripts may use: name -> form of the value.
SBATCH = {
    "job-name": r"\S+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "cpus-per-task": r"\d+",
    "mem": r"\d+[KMGT]?",
    "partition": r"[\w,-]+",
    "account": r"\w+",
    "time": r"(\d+-)?\d+(:\d\d){0,2}",
    "output": r"\S+",
    "open-mode": r"append|truncate",
    "signal": r"([RB]{1,2}:)?(TERM|INT|USR1|\d+)(@\d{1,5})?",
    "requeue": r"",
}


SSH = 'shift 4\ndash -c "$*"'  # a login shell that knows less than bash
SCONTROL = 'printf "node0\\nnode1\\n"'
SRUN = 'shift 2\nfor n in 0 1; do SLURM_NODEID=$n SLURMD_NODENAME=node$n "$@"; done'
SLURM_JOB = "export SLURM_JOB_ID=7 SLURM_JOB_NODELIST=node[0-1] SLURM_CPUS_PER_TASK=3"

ODD = (
    "it's",
    'say "hi"',
    "two\nlines",
    "\n  led by spaces\n\n",
    "tab\tand\rreturn",
    "$HOME ${HOME} $5 $$ $(echo x) $$(HOME) $((1)) `echo x`",
    "$(JOB_COMPLETION_INDEX)",
    "a $",
    "~",
    "~/x",
    "*",
    "back\\slash \\n \\",
    "# no comment",
    "a: b",
    "- a",
    "!{x}",
    "%x",
    "gr\u00fc\u00df \u65e5\u672c \U0001f600",
    "\x1b[1m \x07 \x7f \x85 \u2028 \ufeff",
    "",
)


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]):
    def of(*words: str) -> str:
        if "--keys" not in words and "--launch.allow-plain-tcp" not in words:
            place = words.index("--") if "--" in words else len(words)
            words = (*words[:place], "--allow-plain-tcp", *words[place:])
        assert main(["launch-script", *words]) == 0
        return capsys.readouterr().out

    return of


def directives(text: str) -> dict[str, str]:
    """The options of sbatch; it reads none after the first command."""
    head = re.split(r"^[^#\n]", text, maxsplit=1, flags=re.MULTILINE)[0]
    assert head.count("#SBATCH") == text.count("#SBATCH")
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", head, re.MULTILINE))


def check_shell(text: str) -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("shellcheck"), "--shell=bash", "--severity=warning", "-"],
        input=text,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def run_script(text: str, folder: Path, programs: dict[str, str]) -> list[list[str]]:
    """Run it with these programs, scripts of bash; returns what torchrun was called with."""
    programs["torchrun"] = f'printf "%s\\0" "$@" > {shlex.quote(str(folder))}/calls.$$'
    for name, body in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash"], input=text, env=environment, text=True, check=True, cwd=folder)
    calls = [file.read_bytes().decode().split("\0")[:-1] for file in folder.glob("calls.*")]
    return sorted(calls, key=lambda call: value(call, "--local-addr"))


def value(words: list[str], name: str) -> str:
    return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))


def test_a_slurm_script_has_directives_that_sbatch_takes(script) -> None:
    options = ["--partition", "gpu", "--account", "lab", "--memory", "512G", "--keys", "/k y"]
    text = script("slurm", GPUS, "--hosts", "2x4", *options, "--setup", "source .venv/bin/activate")
    check_shell(text)
    found = directives(text)
    assert all(re.fullmatch(SBATCH[name], given) for name, given in found.items())
    assert found["nodes"] == "2"
    assert found["gpus-per-node"] == "4"
    assert found["partition"] == "gpu"
    assert found["mem"] == "512G"
    assert "gpus-per-node" not in directives(script("slurm", TINY, "--hosts", "2x0"))


def test_each_node_of_a_slurm_job_calls_torchrun_with_its_own_name(script, tmp_path) -> None:
    plain = "--launch.allow-plain-tcp"  # the run's own option, which stays
    text = script("slurm", TINY, "--hosts", "2x0", "--keys", str(tmp_path / "k y"), "--", plain)
    assert "exec torchrun" in text  # a shell that waits for it would be what Slurm signals
    programs = {
        "scontrol": SCONTROL,
        # Slurm may signal the script, too, whose keys are needed until srun has ended.
        "srun": f'kill -TERM $PPID; sleep 0.2; [ -e "$KEYS/made" ] || exit 1\n'
        f'[ "$1" = --cpus-per-task=3 ] || exit 1\n{SRUN}',
        "torchtitan-rl": 'mkdir -p "${@: -2:1}" && touch "${@: -2:1}/made"',
    }
    text = f"{SLURM_JOB}\n{text}"
    (tmp_path / "k y" / "7-1").mkdir(parents=True)
    calls = run_script(text, tmp_path, programs)
    assert [value(call, "--rdzv-conf") for call in calls] == ["is_host=1", "is_host=0"]
    for number, call in enumerate(calls):
        assert value(call, "--nnodes") == "2"
        assert value(call, "--rdzv-endpoint") == "node0:29500"
        assert value(call, "--rdzv-id") == "7"
        assert value(call, "--local-addr") == f"node{number}"
        assert call[call.index("-m") :] == [
            *("-m", "torchtitan_rl.launch", TINY, plain, "--checkpoint.resume"),
            *("--launch.keys", str(tmp_path / "k y" / "7-0")),
            *("--launch.interface", f"node{number}"),
        ]
    assert list((tmp_path / "k y").iterdir()) == []  # what was left of a start that was killed, too


def test_each_node_that_ssh_reaches_calls_torchrun_with_its_own_name(script, tmp_path) -> None:
    nodes = ["--nodes", "10.0.0.1", "fd00::2"]
    options = [*nodes, "--folder", str(tmp_path), "--setup", "export SOME='a b'"]
    text = script("ssh", TINY, "--hosts", "2x0", *options, "--", "--name", "it's a run")
    check_shell(text)
    calls = run_script(text, tmp_path, {"ssh": SSH})
    assert [value(call, "--rdzv-conf") for call in calls] == ["is_host=1", "is_host=0"]
    assert len({value(call, "--rdzv-id") for call in calls}) == 1
    for node, call in zip(("10.0.0.1", "fd00::2"), calls, strict=True):
        assert value(call, "--rdzv-endpoint") == "10.0.0.1:29500"
        assert call[call.index("-m") :] == [
            *("-m", "torchtitan_rl.launch", TINY, "--name", "it's a run", "--checkpoint.resume"),
            *("--launch.allow-plain-tcp", "--launch.interface", node),
        ]


def kubernetes_expands(text: str, variables: dict[str, str]) -> str:
    """What a container gets: ``$(NAME)`` of a variable that it has, and ``$$`` as ``$``."""

    def one(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text, flags=re.DOTALL)


def compose_expands(value: str) -> str:
    assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", value), "Compose would look for a variable"
    return value.replace("$$", "$")


def words_of_a_pod(text: str, folder: Path) -> list[str]:
    _, _, pod = pod_of(text)
    index = {"JOB_COMPLETION_INDEX": "0"}
    (command,) = (kubernetes_expands(one, index) for one in pod["containers"][0]["args"])
    return run_script(f"JOB_COMPLETION_INDEX=0 bash -euc {shlex.quote(command)}", folder, {})[0]


def words_of_compose(text: str, folder: Path) -> list[str]:
    compose_spec.PyCompose.from_yaml(text).validate()
    return [*map(compose_expands, yaml.safe_load(text)["services"]["controller"]["command"])]


def words_of_slurm(text: str, folder: Path) -> list[str]:
    programs = {"scontrol": SCONTROL, "srun": SRUN}
    assert directives(text)["nodes"] == "2"
    return run_script(f"{SLURM_JOB}\n{text}", folder, programs)[0]


def words_of_ssh(text: str, folder: Path) -> list[str]:
    return run_script(text, folder, {"ssh": SSH})[0]


@pytest.mark.parametrize(
    ("kind", "words_of"),
    [
        ("slurm", words_of_slurm),
        ("ssh", words_of_ssh),
        ("kubernetes", words_of_a_pod),
        ("docker-compose", words_of_compose),
    ],
)
def test_no_value_of_an_option_changes_its_meaning(kind, words_of, script, tmp_path) -> None:
    nodes = ["--nodes", "a", "b"] if kind == "ssh" else []
    prompts = [word for odd in ODD for word in ("--task.prompt", odd)]
    config = tmp_path / "it's a $HOME\nrun.py"
    config.write_text("from torchtitan_rl.configs.gsm8k_tiny import config\n")
    text = script(kind, str(config), "--hosts", "2x0", *nodes, "--", *prompts)
    words = words_of(text, tmp_path)
    assert str(config) in words
    place = words.index(prompts[0])
    assert words[place : place + len(prompts)] == prompts


def test_the_end_of_a_connection_reaches_torchrun(script, tmp_path) -> None:
    """As sshd does it: a terminal of its own, which is closed."""
    text = script("ssh", TINY, "--hosts", "2x0", "--nodes", "a", "b")
    run_script(text, tmp_path, {"ssh": 'printf %s "$5" > sent'})
    torchrun = tmp_path / "torchrun"
    torchrun.write_text(
        "#!/usr/bin/env bash\ntrap 'echo got HUP > ended; exit' HUP\necho up; sleep 20 & wait\n"
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    terminal, own = pty.openpty()
    words = ["setsid", "--ctty", "dash", "-c", (tmp_path / "sent").read_text()]
    words = ["env", "--default-signal=HUP", *words]  # the tests may run under nohup
    shell = subprocess.Popen(
        words, stdin=own, stdout=own, stderr=own, env=environment, cwd=tmp_path
    )
    os.close(own)
    assert b"up" in os.read(terminal, 100)
    os.close(terminal)
    shell.wait(10)
    ended = tmp_path / "ended"
    for _ in range(100):
        if ended.exists() and ended.read_text():
            break
        time.sleep(0.05)
    assert ended.read_text() == "got HUP\n"


ON_16 = ("--generator.replicas", "16", "--trainer.data-parallel-shard", "16")


def pod_of(text: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Service, Job and the pod's specification of a manifest that fits the schema."""
    service, job = yaml.safe_load_all(text)
    for one in (service, job):
        kubernetes_validate.validate(one, KUBERNETES, strict=True)
    return service, job, job["spec"]["template"]["spec"]


def test_a_kubernetes_manifest_fits_the_schema_and_its_parts_each_other(script) -> None:
    text = script("kubernetes", GPUS, "--hosts", "2x4", "--name", "sort", "--image", "here/rl:1")
    service, job, pod = pod_of(text)
    assert (
        service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    )
    assert pod["subdomain"] == service["metadata"]["name"] == "sort"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    (container,) = pod["containers"]
    assert container["image"] == "here/rl:1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in pod["volumes"]
    }
    (command,) = container["args"]
    command = kubernetes_expands(command, {})
    check_shell(f"#!/usr/bin/env bash\nJOB_COMPLETION_INDEX=0\n{command}")
    assert "--launch.allow-plain-tcp" in command
    assert "nvidia.com/gpu" not in script("kubernetes", TINY, "--hosts", "2x0")


@pytest.mark.parametrize(
    ("words", "memory", "shared"),
    [
        (["gsm8k_qwen3_4b", "--hosts", "2x8"], 78, 30),  # 4 versions of 7.5 GiB
        (["gsm8k_qwen3_4b", "--hosts", "2x8", "--", "--policy.lora.rank", "16"], 64, 16),
        # 3 versions of 15.3 GiB, half of a state of 122 GiB or more
        (["dapo_math_qwen3_8b", "--hosts", "2x8", "--", *ON_16], 155, 46),
    ],
    ids=["weights", "adapters", "colocated"],
)
def test_a_pod_has_room_for_a_model_that_is_not_here(script, words, memory, shared) -> None:
    _, _, pod = pod_of(script("kubernetes", *words))
    (limit,) = (one["resources"]["limits"]["memory"] for one in pod["containers"])
    (room,) = (one["emptyDir"]["sizeLimit"] for one in pod["volumes"] if "emptyDir" in one)
    assert memory <= int(limit.removesuffix("Gi")) < 1.2 * memory
    assert shared <= int(room.removesuffix("Gi")) <= shared + 2


def test_a_compose_file_fits_the_specification(script) -> None:
    text = script("docker-compose", GPUS, "--hosts", "2x4", "--keys", "./keys")
    compose_spec.PyCompose.from_yaml(text).validate()
    services = yaml.safe_load(text)["services"]
    assert list(services) == ["host0", "host1", "controller"]
    command = services["controller"]["command"]
    place = command.index("--launch.attach")
    assert command[place + 1 : place + 3] == ["tls://host0:26600", "tls://host1:26600"]
    assert services["host1"]["command"][2:4] == ["--address", "tls://host1:26600"]
    keys = {"type": "bind", "source": "./keys/host1", "target": "/keys", "read_only": True}
    assert keys in services["host1"]["volumes"]
    (devices,) = services["host1"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices["device_ids"] == ["4", "5", "6", "7"]
    assert set(services["controller"]["depends_on"]) == {"host0", "host1"}


PLAIN = ("--hosts", "2x0", "--allow-plain-tcp")
WIDE = ("--trainer.data-parallel-shard", "8")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", TINY, "--hosts", "many"], "--hosts is 'many': give NUMBERxDEVICES"),
        (["slurm", GPUS, "--hosts", "2x1"], "generator.replicas is 4: "),
        (["slurm", "no_such", "--hosts", "2x1"], "CONFIG is no_such: there is no such file"),
        (["ssh", TINY, *PLAIN, "--nodes", "a"], "--nodes has 1 names and --hosts 2"),
        (["kubernetes", TINY, *PLAIN, "--name", "A_b"], "--name is 'A_b': give at most"),
        (["slurm", TINY, "--hosts", "2x0", "--image", "x"], "Unrecognized options: --image"),
        (["slurm", TINY, "--hosts", "2x0", "--", "--num-step", "1"], "Unrecognized options: --num"),
        (
            ["slurm", TINY, "--hosts", "2x0", "--num-steps", "9"],
            "Unrecognized options: --num-steps, 9; see torchtitan-rl launch-script slurm CONFIG "
            "--help; options of the run follow --",
        ),
        (["slurm", TINY, "--hosts", "2x0"], "--keys: give a folder of `torchtitan-rl keys`, or"),
        (["slurm", TINY, *PLAIN, "--name", "my run"], "--name is 'my run': give one word"),
        (["slurm", TINY, *PLAIN, "--time", "1 hour"], "--time is '1 hour': give HOURS"),
        (["slurm", TINY, *PLAIN, "--memory", "lots"], "--memory is 'lots': give a number"),
        (["ssh", TINY, *PLAIN, "--nodes", "me@a", "c"], "--nodes is 'me@a': 'me@a' is neither"),
        (
            ["docker-compose", TINY, *PLAIN, "--name", "My.Run 1"],
            "--name is 'My.Run 1': give small",
        ),
        (["kubernetes", TINY, *PLAIN, "--memory", "lots"], "--memory is 'lots': give a quantity"),
        (["slurm", TINY, *PLAIN, "--port", "99999"], "--port is 99999: give 1 to 65535"),
        (
            ["slurm", TINY, *PLAIN, "--", "--launch.trainer-hosts", "5"],
            "launch.trainer_hosts is (5",
        ),
        (["slurm", TINY, *PLAIN, "--", "--schedule.staleness", "-4"], "schedule.staleness is -4: "),
        (
            ["slurm", TINY, *PLAIN, "--", "--launch.attach", "tcp://1.2.3.4:5"],
            "launch.attach is tcp://1.2.3.4:5: the script has its own; leave it out",
        ),
        (["slurm", TINY, *PLAIN, "--", "--launch.keys", "k"], "launch.keys is k: the script has"),
        (
            ["slurm", GPUS, "--hosts", "4x4", "--keys", "k", "--", *WIDE],
            "--allow-plain-tcp: trainer ranks on host2, host3 would exchange gradients",
        ),
        (["slurm", TINY, *PLAIN, "--", "--name", "\udcff"], "'\\udcff': it is not UTF-8 text"),
    ],
)
def test_what_cannot_be_is_one_line_with_exit_code_2(words, message, capsys) -> None:
    assert main(["launch-script", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


EXAMPLES = sorted(path for path in (ROOT / "launch").iterdir() if path.suffix != ".md")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_what_the_command_in_it_prints(example, script) -> None:
    text = example.read_text()
    command = next(line for line in text.splitlines() if "torchtitan-rl launch-script" in line)
    assert script(*shlex.split(command.lstrip("# "))[2:]) == text
