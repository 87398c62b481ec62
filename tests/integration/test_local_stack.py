"""The local stack's life with real processes: start, crash, stop, interrupt. The engine has its own tests."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deploy.local.parts import PART_NAMES
from deploy.local.ports import is_free, plan_ports
from deploy.local.processes import is_alive, session_members
from deploy.local.progress import StepFailed
from deploy.local.stack import Stack
from deploy.local.state import read_state

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("redis", "manager", "sidecar")
"""What starts in seconds."""


def free_port() -> int:
    """Return a gateway port whose whole plan is free now, below the ports the kernel hands out to clients."""
    while True:
        port = 20_000 + 20 * secrets.randbelow(600)
        if all(is_free(planned) for _, planned in plan_ports(port).items()):
            return port


@pytest.fixture
def stack(tmp_path):
    stack = Stack(tmp_path / "stack", port=free_port(), model_dir=tmp_path / "no-model")
    yield stack
    stack.clean()


def states(stack):
    return {status.name: status.state for status in stack.status()}


def test_parts_come_up_are_recorded_and_go_without_a_trace(stack):
    stack.up(SMALL)
    records = read_state(stack.paths)

    assert states(stack) == dict.fromkeys(SMALL, "ready") | {"engine": "stopped", "gateway": "stopped"}
    assert all(session_members(record.name) for record in records.values())

    stack.down()

    assert not any(session_members(record.name) for record in records.values())
    assert not stack.paths.run.exists()
    assert not stack.paths.state.exists()
    assert set(states(stack).values()) == {"stopped"}


def test_a_second_up_starts_nothing_new(stack, capsys):
    stack.up(["redis"])
    before = read_state(stack.paths)
    stack.up(["redis"])

    assert read_state(stack.paths) == before
    assert f"already up: {stack.url}" in capsys.readouterr().err


def test_up_with_other_settings_is_refused_while_something_runs(stack):
    stack.up(["redis"])
    other = Stack(stack.paths.root, dtype="float32")

    with pytest.raises(StepFailed, match="already up with dtype bfloat16, not float32"):
        other.up(["redis"])


def test_a_killed_part_is_dead_until_it_is_started_again_and_keeps_its_data(stack):
    stack.up(["redis"])
    port = stack.status()[0].url.rpartition(":")[2].partition("/")[0]
    ask(port, "SET story told")
    stack.kill("redis")

    assert states(stack)["redis"] == "dead"
    with pytest.raises(StepFailed, match="redis does not run"):
        stack.kill("redis")

    stack.start("redis")

    assert states(stack)["redis"] == "ready"
    assert ask(port, "GET story").splitlines()[1] == "told"


def test_another_process_finds_and_stops_the_stack(stack):
    stack.up(["redis"])
    record = read_state(stack.paths)["redis"]
    done = run("--directory", str(stack.paths.root), "down")
    stack._children["redis"].wait(10)

    assert done.returncode == 0, done.stderr
    assert not is_alive(record.name)


def test_a_stack_that_died_with_its_machine_is_started_anew(stack):
    stack.up(["redis"])
    stack.kill("redis")
    record = read_state(stack.paths)["redis"]
    text = stack.paths.state.read_text()
    # The pid belongs to somebody else now: to this very process.
    stack.paths.state.write_text(text.replace(f'"pid": {record.pid}', f'"pid": {os.getpid()}'))

    assert states(stack)["redis"] == "dead"
    stack.up(["redis"])
    assert states(stack)["redis"] == "ready"
    os.kill(os.getpid(), 0)


def test_a_taken_port_is_named_with_who_has_it(stack):
    port = stack._settings(remembered=False).ports.redis
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()

        with pytest.raises(StepFailed, match=rf"port {port} \(redis\): taken by pid {os.getpid()} .*\n.*PORT="):
            stack.up(["redis"])

    assert read_state(stack.paths) == {}


def test_a_part_that_dies_shows_its_log_and_takes_the_others_with_it(tmp_path):
    port = free_port()
    broken = Stack(tmp_path / "stack", port=port, env={"MANAGER_REDIS_URL": "nonsense://"})
    with pytest.raises(
        StepFailed, match=r"(?s)manager ended with exit [1-9]\d*; last lines of \S*manager\.log:\n.*nonsense"
    ):
        broken.up(SMALL)

    assert read_state(broken.paths) == {}
    assert not broken.paths.run.exists()
    assert is_free(plan_ports(port).redis)
    broken.clean()


def test_an_unknown_part_is_refused_with_the_names_there_are(stack):
    with pytest.raises(StepFailed, match=f"PART= one of {', '.join(PART_NAMES)}"):
        stack.start("envoy")


def test_a_part_cannot_be_started_into_a_stack_that_is_down(stack):
    with pytest.raises(StepFailed, match="the stack is not up"):
        stack.start("redis")


def test_two_stacks_run_side_by_side(stack, tmp_path):
    other = Stack(tmp_path / "other", port=free_port())
    try:
        stack.up(SMALL)
        other.up(SMALL)
        stack.down()

        assert [states(other)[name] for name in SMALL] == ["ready"] * 3
    finally:
        other.clean()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_starting_stops_what_was_started(tmp_path, number):
    directory = tmp_path / "stack"
    command = [sys.executable, "-m", "deploy.local", "--directory", str(directory), "up", "--port", str(free_port())]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stack = Stack(directory)
    deadline_s = time.monotonic() + 30
    while "sidecar" not in read_state(stack.paths) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    records = read_state(stack.paths)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)

    assert process.returncode == 130, told
    assert "stopping what was started" in told
    assert "redis" in records
    assert not any(session_members(record.name) for record in records.values())
    stack.clean()


def run(*arguments):
    command = [sys.executable, "-m", "deploy.local", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def ask(port, command):
    with socket.create_connection(("127.0.0.1", int(port)), timeout=5) as connection:
        connection.sendall(f"{command}\r\n".encode())
        return connection.recv(4096).decode()
