"""The local stack's life with real processes: start, crash, stop, interrupt. The engine has its own tests."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from deploy.local.model import MODEL_NAME
from deploy.local.parts import part_names
from deploy.local.ports import PORTS_OF_A_STACK, is_free, plan_ports
from deploy.local.processes import is_alive, name_of, session_members, start_process
from deploy.local.progress import StepFailed
from deploy.local.readiness import envoy_hosts, gateway_endpoints
from deploy.local.stack import Stack
from deploy.local.state import API_KEYS, RunningPart, read_state, write_part
from tests.kit.envoy_names import PLUGIN, PODS
from tests.kit.patience import PARTS
from tests.kit.ports import free_ports
from tests.kit.until import wait_until

pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("redis", "manager", "sidecar")
"""What starts in seconds."""


@pytest.fixture
def stack(tmp_path):
    stack = Stack(tmp_path / "stack", port=free_ports(PORTS_OF_A_STACK), model_dir=tmp_path / "no-model")
    yield stack
    stack.clean()


def states(stack):
    """Return each part's state; a part that is late for one look is looked at again."""
    return wait_until(
        lambda: {status.name: status.state for status in stack.status()},
        is_so=lambda found: "starting" not in found.values(),
        what="no part is starting",
    )


def test_parts_come_up_are_recorded_and_go_without_a_trace(stack):
    stack.up(SMALL)
    records = read_state(stack.paths)

    assert states(stack) == dict.fromkeys(part_names(1), "stopped") | dict.fromkeys(SMALL, "ready")
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
    assert f"already running: {stack.url}" in capsys.readouterr().err


def test_up_with_other_settings_is_refused_while_something_runs(stack):
    stack.up(["redis"])
    other = Stack(stack.paths.root, dtype="float32")

    with pytest.raises(StepFailed, match="the stack runs with dtype bfloat16, not float32"):
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


def test_what_a_dead_part_left_on_its_port_ends_before_the_part_starts_again(stack):
    stack.up(["manager"])
    port = plan_ports(int(stack.url.rpartition(":")[2])).redis
    listen = f"import socket, time; kept = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"
    leader = start_process(
        ["sh", "-c", '"$0" -c "$1" & exit', sys.executable, listen],
        env=dict(os.environ),
        cwd=ROOT,
        log=stack.paths.log("redis"),
    )
    record = name_of(leader.pid)
    write_part(stack.paths, "redis", RunningPart(record.pid, "redis://gone", record.started))
    leader.wait(30)
    wait_until(lambda: not is_free(port), what="the port is taken")

    stack.start("redis")

    assert states(stack)["redis"] == "ready"
    assert not session_members(record)


def test_another_process_finds_and_stops_the_stack(stack):
    stack.up(["redis"])
    record = read_state(stack.paths)["redis"]
    done = run("--directory", str(stack.paths.root), "down")
    stack._processes.reap("redis")

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

        with pytest.raises(StepFailed, match=rf"port {port} \(redis\): in use by pid {os.getpid()} .*\n.*PORT="):
            stack.up(["redis"])

    assert read_state(stack.paths) == {}


def test_a_part_that_dies_shows_its_log_and_takes_the_others_with_it(tmp_path):
    port = free_ports(PORTS_OF_A_STACK)
    broken = Stack(tmp_path / "stack", port=port, env={"MANAGER_REDIS_URL": "nonsense://"})
    with pytest.raises(
        StepFailed, match=r"(?s)manager ended with exit [1-9]\d*; last lines of \S*\.log:\n.*unknown scheme of"
    ):
        broken.up(SMALL)

    assert read_state(broken.paths) == {}
    assert not broken.paths.run.exists()
    assert is_free(plan_ports(port).redis)
    broken.clean()


def test_each_engine_gets_a_sidecar_of_its_own(tmp_path):
    pair = Stack(tmp_path / "stack", port=free_ports(PORTS_OF_A_STACK), engines=2)
    try:
        pair.up([*SMALL, "sidecar-1"])
        pair.kill("sidecar-1")

        assert tuple(states(pair)) == part_names(2)
        assert [states(pair)[name] for name in ("sidecar", "sidecar-1")] == ["ready", "dead"]
    finally:
        pair.clean()


@pytest.mark.parametrize("engines", [0, 5])
def test_a_number_of_engines_that_has_no_ports_is_refused(tmp_path, engines):
    with pytest.raises(StepFailed, match=f"ENGINES={engines} is out of range: 1 to 4"):
        Stack(tmp_path / "stack", engines=engines)


@pytest.mark.thorough
def test_two_engines_are_seen_and_get_requests_but_for_one_that_drains_or_is_gone(tmp_path):
    pair = Stack(tmp_path / "stack", port=free_ports(PORTS_OF_A_STACK), engines=2, env=PARTS)
    admin = f"http://127.0.0.1:{pair._settings(remembered=False).ports.envoy_admin}"

    def seen():
        known = gateway_endpoints(pair.gateway_metrics_url)
        ready = [known.get(name, {}).get("ready") for name in ("engine-0", "engine-1")]
        return ready, envoy_hosts(admin, PODS), len(envoy_hosts(admin, PLUGIN))

    both = zip(pair.engine_urls, pair.turn_urls, strict=True)
    addresses = [[url.removeprefix("http://") for url in urls] for urls in both]

    def until_seen(ready, hosts):
        wait_until(
            seen,
            is_so=lambda found: found == (ready, set(hosts), 1),
            what="gateway and Envoy have seen it",
            deadline_s=90,
        )

    try:
        with stub_engine(pair.engine_urls[0]) as first:
            with stub_engine(pair.engine_urls[1]) as second:
                pair.up([name for name in part_names(2) if not name.startswith("engine")])
                until_seen([True, True], [*addresses[0], *addresses[1]])
                pair.drain("engine")
                first.clear()
                second.clear()
                statuses = [ask_models(pair) for _ in range(10)]

                assert statuses == [200] * 10
                assert (len(first), len(second)) == (0, 10)

                pair.kill("gateway")
                pair.start("gateway")
                pair.drain("engine-1")
                pair.drain("engine", draining=False)
                pair.kill("envoy")
                pair.start("envoy")
                until_seen([True, True], [*addresses[0], *addresses[1]])
                first.clear()

                assert ask_models(pair) == 200
                assert len(first) == 1
            until_seen([True, False], addresses[0])

        assert gateway_endpoints("http://127.0.0.1:1") == {}
        assert envoy_hosts("http://127.0.0.1:1", PODS) == set()
    finally:
        pair.clean()


def test_only_engines_drain_and_only_before_a_gateway(stack):
    with pytest.raises(StepFailed, match="sidecar is not an engine"):
        stack.drain("sidecar")
    with pytest.raises(StepFailed, match="the gateway does not run"):
        stack.drain("engine")


def test_an_unknown_part_is_refused_with_the_names_there_are(stack):
    with pytest.raises(StepFailed, match=f"PART must be one of {', '.join(part_names(1))}"):
        stack.start("nginx")


def test_a_part_cannot_be_started_into_a_stack_that_is_down(stack):
    with pytest.raises(StepFailed, match="the stack is not running"):
        stack.start("redis")


@pytest.mark.thorough
def test_two_stacks_run_side_by_side(stack, tmp_path):
    other = Stack(tmp_path / "other", port=free_ports(PORTS_OF_A_STACK))
    try:
        stack.up(SMALL)
        other.up(SMALL)
        stack.down()

        assert [states(other)[name] for name in SMALL] == ["ready"] * 3
    finally:
        other.clean()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_ctrl_c_while_starting_stops_what_was_started(tmp_path, number):
    directory = tmp_path / "stack"
    command = [
        sys.executable,
        "-m",
        "deploy.local",
        "--directory",
        str(directory),
        "up",
        "--port",
        str(free_ports(PORTS_OF_A_STACK)),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stack = Stack(directory)
    try:
        wait_until(lambda: "sidecar" in read_state(stack.paths), what="parts are starting", deadline_s=90)
        records = read_state(stack.paths)
        process.send_signal(number)
        _, told = process.communicate(timeout=120)

        assert process.returncode == 130, told
        assert "stopping the started parts" in told
        assert "redis" in records
        assert not any(session_members(record.name) for record in records.values())
    finally:
        process.kill()
        process.communicate()
        stack.clean()


@contextmanager
def stub_engine(url):
    """Serve what gateway and Envoy ask an engine for; the value lists the requests, health checks apart."""
    asked = []

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            if self.headers.get("x-request-id"):
                asked.append(self.path)
            body = json.dumps({"data": [{"id": MODEL_NAME}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # five connections at most would wait

    host, _, port = url.removeprefix("http://").rpartition(":")
    server = Server((host, int(port)), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def ask_models(stack):
    key = next(iter(API_KEYS))
    return httpx.get(f"{stack.url}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=60).status_code


def run(*arguments):
    command = [sys.executable, "-m", "deploy.local", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def ask(port, command):
    with socket.create_connection(("127.0.0.1", int(port)), timeout=5) as connection:
        connection.sendall(f"{command}\r\n".encode())
        return connection.recv(4096).decode()
