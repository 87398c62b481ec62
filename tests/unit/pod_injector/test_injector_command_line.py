"""Command lines as people write them: extended where that is safe, else left alone with a reason."""

from __future__ import annotations

import copy
import shlex
import subprocess

import pytest

from pod_injector.command_line import find_engine, looks_like_vllm
from pod_injector.engine_options import EngineOptions
from pod_injector.not_injected import NotInjected, Reason
from tests.unit.pod_injector.pods import ARGUMENTS, make_engine

ADDED = list(ARGUMENTS)
QUOTED = "".join(f" {shlex.quote(word)}" for word in ADDED)
SERVE = ["vllm", "serve", "m"]
API_SERVER = ["-m", "vllm.entrypoints.openai.api_server"]


def extended(**container):
    """Return command and args of a container after the arguments were appended."""
    engine = make_engine(**container)
    find_engine(engine).append(engine, ADDED)
    return engine.get("command"), engine.get("args")


@pytest.mark.parametrize(
    ("command", "args", "expected"),
    [
        (None, ["--model", "m"], (None, ["--model", "m", *ADDED])),
        (None, ["org/model", "--port=8000"], (None, ["org/model", "--port=8000", *ADDED])),
        (None, ["serve", "m"], (None, ["serve", "m", *ADDED])),
        (SERVE, None, ([*SERVE, *ADDED], None)),
        (SERVE, ["--port", "8000"], (SERVE, ["--port", "8000", *ADDED])),
        (["/usr/bin/vllm"], ["serve", "m"], (["/usr/bin/vllm"], ["serve", "m", *ADDED])),
        (["python3", *API_SERVER], ["--model", "m"], (["python3", *API_SERVER], ["--model", "m", *ADDED])),
        (["tini", "--", *SERVE], None, (["tini", "--", *SERVE, *ADDED], None)),
        (
            ["numactl", "-N", "0", "python3", "-u", *API_SERVER],
            None,
            (["numactl", "-N", "0", "python3", "-u", *API_SERVER, *ADDED], None),
        ),
        (["sh", "-c"], ["vllm serve m"], (["sh", "-c"], ["vllm serve m" + QUOTED])),
        (
            ["/bin/bash", "-lc", "exec vllm serve m 2>&1 | tee /log"],
            None,
            (["/bin/bash", "-lc", "exec vllm serve m" + QUOTED + " 2>&1 | tee /log"], None),
        ),
        (
            ["bash", "-o", "pipefail", "-c", "pip install x && vllm serve m; echo gone"],
            None,
            (["bash", "-o", "pipefail", "-c", "pip install x && vllm serve m" + QUOTED + "; echo gone"], None),
        ),
        (
            ["tini", "--", "sh", "-c", "vllm serve m &\nwait"],
            None,
            (["tini", "--", "sh", "-c", "vllm serve m" + QUOTED + " &\nwait"], None),
        ),
        (None, ["bash", "-c", "vllm serve m"], (None, ["bash", "-c", "vllm serve m" + QUOTED])),
        (
            None,
            ["sh", "-c", "vllm serve $MODEL --dtype $DTYPE"],
            (None, ["sh", "-c", "vllm serve $MODEL --dtype $DTYPE" + QUOTED]),
        ),
    ],
)
def test_arguments_are_appended_where_vllm_reads_them(command, args, expected):
    assert extended(command=command, args=args) == expected


@pytest.mark.parametrize(
    ("command", "args", "reason"),
    [
        (None, None, Reason.COMMAND_UNKNOWN),
        (None, ["bash", "/start.sh"], Reason.COMMAND_UNKNOWN),
        (["/start.sh"], ["--port", "8000"], Reason.COMMAND_UNKNOWN),
        (["bash", "/start.sh", "-c"], None, Reason.COMMAND_UNKNOWN),
        (["echo", *SERVE], None, Reason.COMMAND_UNKNOWN),
        (["vllm", "bench", "serve"], None, Reason.COMMAND_UNKNOWN),
        (["python3", "-m", "vllm.entrypoints.api_server"], None, Reason.COMMAND_UNKNOWN),
        (["sh", "-c", "echo vllm serve m"], None, Reason.COMMAND_UNKNOWN),
        (["sh", "-c", "su me -c 'vllm serve m'"], None, Reason.COMMAND_UNKNOWN),
        (["sh", "-c", 'vllm serve m "$@"'], ["--port", "1"], Reason.SHELL_SCRIPT),
        (["sh", "-c", "if x; then vllm serve a; else vllm serve b; fi"], None, Reason.SHELL_SCRIPT),
        (["sh", "-c", "cat <<E\nvllm serve m\nE"], None, Reason.SHELL_SCRIPT),
        (["sh", "-c", "vllm serve 'm"], None, Reason.SHELL_SCRIPT),
        # Seen injected: what was in them came before ours, and lost.
        (["sh", "-c", "exec vllm serve $MODEL $EXTRA_ARGS"], None, Reason.COMMAND_UNKNOWN),
        (["sh", "-c", "OPTS='--port 9000'; vllm serve m $OPTS"], None, Reason.COMMAND_UNKNOWN),
        (["bash", "-c", "A=(--port 9000); vllm serve m ${A[@]}"], None, Reason.COMMAND_UNKNOWN),
    ],
)
def test_a_command_that_cannot_be_extended_safely_is_left_alone(command, args, reason):
    with pytest.raises(NotInjected) as refusal:
        find_engine(make_engine(command=command, args=args))

    assert refusal.value.reason is reason


def test_an_extended_script_gives_vllm_the_arguments_word_for_word(tmp_path):
    fake = tmp_path / "vllm"
    fake.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    fake.chmod(0o755)
    _, (script,) = extended(command=["sh", "-c"], args=["set -e; vllm serve 'my model' --port 8000 2>/dev/null | cat"])

    said = subprocess.run(
        ["sh", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, check=True, timeout=60
    )

    assert said.stdout.decode().split("\0")[:-1] == ["serve", "my model", "--port", "8000", *ADDED]


def test_kubernetes_replaces_nothing_in_what_is_appended():
    engine = make_engine()
    find_engine(engine).append(engine, ["$(HOME)"])

    assert engine["args"][-1] == "$$(HOME)"


def test_finding_an_engine_changes_nothing():
    engine = make_engine(command=["sh", "-c"], args=["vllm serve m"])
    before = copy.deepcopy(engine)
    find_engine(engine)

    assert engine == before


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        (make_engine(), True),
        ({"image": "registry:5000/team/vllm-openai@sha256:0", "args": ["--model", "m"]}, True),
        ({"image": "own:1", "command": SERVE}, True),
        ({"image": "own:1", "command": ["sh", "-c", "vllm serve m 'x"]}, True),
        ({"image": "nginx:1", "args": ["-g", "daemon off;"]}, False),
        ({"image": "own:1", "command": ["sleep", "1"]}, False),
        ({"image": "vllm.example.org/nginx:1", "args": ["-g"]}, False),
    ],
)
def test_vllm_is_told_by_its_command_or_else_by_its_image(container, expected):
    assert looks_like_vllm(container) is expected


def check(words, *, port=8000, https=False, trusts_config_file=False):
    EngineOptions(words).check(port=port, https=https, trusts_config_file=trusts_config_file)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["m", "--kv-transfer-config", "{}"], Reason.KV_CONNECTOR),
        (["m", "--kv_transfer_config={}"], Reason.KV_CONNECTOR),
        (["m", "--kv-transfer-config.kv_connector=NixlConnector"], Reason.KV_CONNECTOR),
        (["m", "--kv-offloading-size", "8"], Reason.KV_CONNECTOR),
        (["m", "--config", "/c.yaml"], Reason.CONFIG_FILE),
        (["m", "--port", "9000"], Reason.PORT),
        (["m", "--port=$PORT"], Reason.PORT),
        (["m", "--headless"], Reason.SERVER),
        (["m", "--uds", "/s"], Reason.SERVER),
        (["m", "--host", "127.0.0.1"], Reason.SERVER),
        (["m", "--ssl-certfile", "/c"], Reason.SERVER),
        (["m", "--", "x"], Reason.COMMAND_UNKNOWN),
    ],
)
def test_options_that_forbid_an_injection_are_told_apart(words, reason):
    with pytest.raises(NotInjected) as refusal:
        check(words)

    assert refusal.value.reason is reason


@pytest.mark.parametrize(
    "words",
    [
        ["m"],
        ["m", "--middleware", "their.Own"],
        ["m", "--host", "0.0.0.0", "--port", "8000"],
        ["--model=m", "--host", "::"],
    ],
)
def test_other_options_do_not(words):
    check(words)


def test_the_last_port_counts_and_may_come_from_the_containers_env():
    check(["m", "--port", "1", "--port", "8000"])
    engine = make_engine(args=["m", "--port", "$(PORT)"], env=[{"name": "PORT", "value": "8000"}])
    check(find_engine(engine).options)
    engine = make_engine(
        command=["sh", "-c"], args=["vllm serve m $MORE"], env=[{"name": "MORE", "value": "--port 9 --headless"}]
    )

    with pytest.raises(NotInjected) as refusal:
        check(find_engine(engine).options)

    assert refusal.value.reason is Reason.SERVER


def test_a_configuration_file_is_taken_when_its_owner_vouches_for_it():
    check(["m", "--config", "/c.yaml"], trusts_config_file=True)


def test_a_certificate_of_their_own_and_one_of_the_release_exclude_each_other():
    with pytest.raises(NotInjected):
        check(["m", "--ssl-keyfile", "/k"], https=True)


@pytest.mark.parametrize(
    ("command", "args"), [(SERVE, ["$(A)" * 30_000]), (SERVE, ["$(A)"] * 30_000), (None, ["serve", "$A" * 30_000])]
)
def test_a_few_bytes_that_stand_for_gigabytes_are_not_expanded(command, args):
    engine = make_engine(command=command, args=args, env=[{"name": "A", "value": "z" * 100_000}])
    with pytest.raises(NotInjected, match="longer than Linux allows"):
        find_engine(engine)


def test_a_script_that_no_process_could_be_given_is_not_read():
    with pytest.raises(NotInjected, match="longer than Linux allows"):
        find_engine(make_engine(command=["sh", "-c"], args=["vllm serve m " + "a " * 65_536]))
