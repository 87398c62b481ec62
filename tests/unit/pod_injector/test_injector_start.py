"""vLLM's arguments at the start of its process: real processes, with a stub in vLLM's place."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from contextcache.clock import ManualClock
from kv_sidecar.settings import SidecarSettings
from kv_sidecar.sidecar import Sidecar
from pod_injector.payload import copy_payload
from pod_injector.payload_start.context_cache_start import ARGUMENTS_ENV, REPORT_NAME

TLS = ["--ssl-certfile", "/c", "--ssl-keyfile", "/k"]
SHOW = "import json, sys\nprint(json.dumps(sys.argv[1:]))\n"
SPAWNING = """
import json, multiprocessing, subprocess, sys
def child(queue): queue.put(sys.argv[1:])
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    inherited = queue.get()
    process.join()
    show = "import json, sys; print(json.dumps(sys.argv[1:]))"
    again = subprocess.run([sys.executable, "-c", show], capture_output=True)
    print(json.dumps([sys.argv[1:], inherited, json.loads(again.stdout)]))
"""


class Container:
    """A folder with the payload, a stub of vLLM as command and as modules, and the place of the sidecar's socket."""

    def __init__(self, folder):
        (folder / "image" / "ours").mkdir(parents=True)
        copy_payload(folder / "payload", source=folder / "image")
        self.folder, self.bin, self.site = folder, folder / "bin", folder / "site"
        self.bin.mkdir()
        self.install("vllm", SHOW)
        for module in ("vllm/entrypoints/openai/api_server", "vllm/entrypoints/cli/main", "other"):
            file = self.site / f"{module}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            (file.parent / "__init__.py").touch()
            file.write_text(SHOW)
        (self.site / "vllm" / "entrypoints" / "__init__.py").touch()
        (self.site / "vllm" / "__init__.py").touch()
        self.env = {
            "PATH": f"{self.bin}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONPATH": f"{folder}/payload/start:{self.site}",
        }
        transfer = {"kv_connector": "Ours", "kv_connector_extra_config": {"sidecar": f"unix://{folder}/sidecar.sock"}}
        self.added = ["--kv-transfer-config", json.dumps(transfer), "--enable-prompt-tokens-details"]
        self.release(arguments=self.added)

    def install(self, name, program):
        """Put a console script on PATH."""
        (self.bin / name).write_text(f"#!{sys.executable}\n{program}")
        (self.bin / name).chmod(0o755)

    def release(self, *, arguments, https=False):
        """Set the env variable as the injector does."""
        self.env[ARGUMENTS_ENV] = json.dumps({"arguments": arguments, "port": 8000, "https": https})

    def start(self, *command, **env):
        """Run a command; return what the stub was given, and the lines about the start."""
        done = subprocess.run(
            command, env=self.env | env, cwd=self.folder, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    @property
    def report(self):
        file = self.folder / REPORT_NAME
        return file.read_text() if file.exists() else None


@pytest.fixture
def container(tmp_path):
    return Container(tmp_path)


API_SERVER = ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"]
KSERVE_LIKE = 'ARGS="--dtype auto"; eval "exec vllm serve /m --port 8000 ${ARGS} $@"'


@pytest.mark.parametrize(
    ("command", "given"),
    [
        (["vllm", "serve", "m"], ["serve", "m"]),
        (["python3", "-u", "bin/vllm", "serve", "m"], ["serve", "m"]),
        (API_SERVER, ["--model", "m"]),
        (["python3", "-um", "vllm.entrypoints.openai.api_server", "--model=m"], ["--model=m"]),
        (["python3", "-mvllm.entrypoints.openai.api_server", "--model=m"], ["--model=m"]),
        (["python3", "-m", "vllm.entrypoints.cli.main", "serve", "m"], ["serve", "m"]),
        (["nice", "vllm", "serve", "m"], ["serve", "m"]),
        (["sh", "-c", "vllm serve $MODEL --dtype $DTYPE 2>&1 | cat"], ["serve", "my model", "--dtype", "half"]),
        (["sh", "-c", KSERVE_LIKE, "--", "--seed=1"], ["serve", "/m", "--port", "8000", "--dtype", "auto", "--seed=1"]),
        (["bash", "-c", 'A=(--seed 1); exec vllm serve m "${A[@]}"'], ["serve", "m", "--seed", "1"]),
        (["sh", "-c", "cat <<E >/dev/null\nvllm serve x\nE\nvllm serve m"], ["serve", "m"]),
        (["./start.sh", "m"], ["serve", "m"]),
    ],
)
def test_vllm_gets_the_arguments_however_it_is_started(container, command, given):
    (container.folder / "start.sh").write_text('#!/bin/sh\nset -e\nexec vllm serve "$@"\n')
    (container.folder / "start.sh").chmod(0o755)
    words = [word.replace("$MODEL", '"$MODEL"') for word in command]

    found, _ = container.start(*words, MODEL="my model", DTYPE="half")

    assert found == [*given, *container.added]
    assert container.report == "added"


@pytest.mark.parametrize(
    "command",
    [
        ["vllm", "bench", "serve"],
        ["vllm", "--version"],
        ["python3", "-m", "other", "serve"],
        ["python3", "-c", "import json, sys; print(json.dumps(sys.argv[1:]))", "serve", "vllm"],
        ["bin/other", "serve"],
    ],
)
def test_other_programs_keep_their_arguments(container, command):
    container.install("other", SHOW)
    found, _ = container.start(*command)

    assert not set(found) & set(container.added)
    assert container.report is None


def test_children_of_vllm_get_no_arguments_of_their_own(container):
    container.install("vllm", SPAWNING)
    found, _ = container.start("vllm", "serve", "m")

    # A spawned child inherits sys.argv, and parses nothing.
    assert found == [["serve", "m", *container.added], ["serve", "m", *container.added], []]


def test_arguments_that_a_wrapper_hands_on_are_not_added_twice(container):
    container.install("real-vllm", SHOW)
    container.install("vllm", f"import os, sys\nos.execv('{container.bin}/inner/vllm', ['vllm', *sys.argv[1:]])\n")
    (container.bin / "inner").mkdir()
    (container.bin / "real-vllm").rename(container.bin / "inner" / "vllm")

    assert container.start("vllm", "serve", "m")[0] == ["serve", "m", *container.added]


def test_arguments_come_before_a_bare_double_dash(container):
    assert container.start("vllm", "serve", "m", "--", "x")[0] == ["serve", "m", *container.added, "--", "x"]


def test_other_middleware_stays(container):
    assert container.start("vllm", "serve", "m", "--middleware", "own.M")[0][:4] == [
        "serve",
        "m",
        "--middleware",
        "own.M",
    ]


REFUSED = {
    "another connector": (["--kv-transfer-config", "{}"], "kv-connector"),
    "a part of another connector": (["--kv_transfer_config.kv_connector=X"], "kv-connector"),
    "offloading": (["--kv-offloading-size", "4"], "kv-connector"),
    "another port": (["--port", "9000"], "port"),
    "the last port": (["--port=8000", "--port", "9"], "port"),
    "no HTTP": (["--headless"], "server"),
    "a socket": (["--uds=/s"], "server"),
    "gRPC": (["--grpc"], "server"),
    "loopback": (["--host", "127.0.0.1"], "server"),
    "a name of loopback": (["--host=localhost"], "server"),
    "an own certificate": (["--ssl-certfile", "/own"], "server"),
    "a connector in the file": (["--config", "c.yaml"], "kv-connector"),
    "a port in the file": (["--config", "p.yaml"], "port"),
    "a file that is missing": (["--config", "none.yaml"], "config-file"),
}


@pytest.mark.parametrize(("words", "reason"), REFUSED.values(), ids=REFUSED)
def test_an_engine_that_the_release_cannot_use_starts_unchanged_and_says_why(container, words, reason):
    (container.folder / "c.yaml").write_text("kv_transfer_config: {kv_connector: Other}\n")
    (container.folder / "p.yaml").write_text("port: 9000\n")
    script = "exec vllm serve m " + shlex.join(words)
    found, said = container.start("sh", "-c", script)

    assert found == ["serve", "m", *words]
    assert said.startswith(f"context-cache: vLLM starts without context-cache ({reason}): ")
    assert said.count("\n") == 1
    assert container.report == reason


def test_a_command_line_wins_over_the_file_as_in_vllm(container):
    (container.folder / "p.yaml").write_text("port: 9000\n")

    found, _ = container.start("vllm", "serve", "m", "--config", "p.yaml", "--port", "8000")

    assert found[-len(container.added) :] == container.added


@pytest.mark.parametrize(("value", "outcome"), [("1", "rust-frontend"), ("yes", "rust-frontend"), ("0", "added")])
def test_the_rust_front_end_gets_no_connector(container, value, outcome):
    container.start("sh", "-c", f"export VLLM_USE_RUST_FRONTEND={value}; exec vllm serve m")

    assert container.report == outcome


def test_with_mutual_tls_another_connector_still_gets_the_certificate_that_probes_expect(container):
    """Without it an HTTPS probe of the patched pod would fail for ever, and the kubelet would kill vLLM."""
    container.release(arguments=[*container.added, *TLS], https=True)
    found, _ = container.start("vllm", "serve", "m", "--kv-transfer-config", "{}")

    assert found == ["serve", "m", "--kv-transfer-config", "{}", *TLS]
    assert container.report == "kv-connector"


@pytest.mark.parametrize("option", ["-S", "-I", "-E"])
def test_a_python_without_our_code_starts_vllm_unchanged_and_reports_nothing(container, option):
    assert container.start("python3", option, "bin/vllm", "serve", "m")[0] == ["serve", "m"]
    assert container.report is None


def test_a_fault_of_ours_starts_vllm_unchanged(container):
    found, said = container.start("vllm", "serve", "m", **{ARGUMENTS_ENV: "no JSON"})

    assert found == ["serve", "m"]
    assert "vLLM's arguments stay as they are" in said


def test_without_a_place_for_the_report_the_arguments_are_added_all_the_same(container):
    added = [word.replace(str(container.folder), "/nowhere") for word in container.added]
    container.release(arguments=added)
    found, said = container.start("vllm", "serve", "m")

    assert found == ["serve", "m", *added]
    assert "was not written" in said


def test_a_sitecustomize_of_the_image_sees_the_arguments(container):
    (container.site / "sitecustomize.py").write_text("import sys\nsys.argv.append('seen')\n")

    assert container.start("vllm", "serve", "m")[0] == ["serve", "m", *container.added, "seen"]


def test_the_sidecar_shows_the_outcome_of_the_last_start(container):
    settings = SidecarSettings(unix_socket=container.folder / "sidecar.sock", data_dir=container.folder / "data")
    registry = CollectorRegistry()
    Sidecar(settings, clock=ManualClock(), registry=registry)

    def shown():
        name = "contextcache_sidecar_engine_start"
        outcomes = ("added", *(reason for _, reason in REFUSED.values()), "rust-frontend")
        return {outcome for outcome in outcomes if registry.get_sample_value(name, {"outcome": outcome})}

    before = shown()
    container.start("sh", "-c", "vllm serve m --port 9000")
    refused = shown()
    container.start("vllm", "serve", "m")

    assert (before, refused, shown()) == (set(), {"port"}, {"added"})


def test_a_tested_connector_of_the_engine_stays_beside_ours(container):
    """Seen failing: the engine's own connector was refused, or ours replaced it."""
    theirs = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"a": 1}}
    command = ["vllm", "serve", "m", "--kv-transfer-config", json.dumps(theirs)]

    given, lines = container.start(*command)
    again, _ = container.start("vllm", *given)

    added = given[len(command) - 1 :]
    config = json.loads(added.pop(1))
    ours = json.loads(container.added[1])
    ours["kv_connector_extra_config"]["layout"] = ""
    assert added == ["--kv-transfer-config", "--enable-prompt-tokens-details"]
    assert (config["kv_connector"], config["kv_load_failure_policy"]) == ("MultiConnector", "recompute")
    assert config["kv_connector_extra_config"] == {"connectors": [ours, theirs]}
    assert (container.report, lines) == ("added", "")
    assert again == given


def test_an_untested_connector_is_named_with_the_tested_ones(container):
    _, lines = container.start("vllm", "serve", "m", "--kv-transfer-config", '{"kv_connector": "NixlConnector"}')

    assert "not tested beside ours; tested: ExampleConnector" in lines
    assert container.report == "kv-connector"
