"""Manager, sidecar and gateway as processes: what ends their start, and what their port for probes says."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from contextcache.process.metrics import ProbePage, health_page, metrics_server
from kv_sidecar.client import KVSidecarClient
from tests.kit.certificates import CertificateFiles
from tests.kit.gateway_parts import KEY, SECRET, write_keys
from tests.kit.ports import free_port
from tests.kit.until import until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 90
PARTS = {"gateway": "gateway", "context_manager": "manager", "kv_sidecar": "sidecar"}


@pytest.fixture
def certificates(tmp_path):
    return CertificateFiles(tmp_path / "tls")


def environment_of(module: str, tmp_path: Path, **settings: str) -> dict[str, str]:
    """Return an environment in which the part starts alone."""
    prefix = f"{PARTS[module].upper()}_"
    (tmp_path / "secret").write_bytes(SECRET)
    write_keys(tmp_path / "keys.json", {KEY: "demo"})
    defaults = {
        "gateway": {
            "PORT": "0",
            "ENDPOINTS": '[{"name": "pod-a", "url": "http://127.0.0.1:1"}]',
            "SECRET_FILE": str(tmp_path / "secret"),
            "API_KEYS_FILE": str(tmp_path / "keys.json"),
        },
        "context_manager": {"LISTEN": "127.0.0.1:0", "REDIS_URL": "redis://127.0.0.1:1/0"},
        "kv_sidecar": {"LISTEN": "127.0.0.1:0", "DATA_DIR": str(tmp_path / "data")},
    }[module]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefix)}
    return kept | {f"{prefix}{name}": value for name, value in {**defaults, **settings}.items()}


def run(module: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


@dataclass(frozen=True)
class Refused:
    code: object
    stderr: str


@pytest.fixture
def refusal(monkeypatch, capsys):
    """As `run`, in this process: for settings, which are looked at before anything else."""

    def refusal(module: str, environment: dict[str, str]) -> Refused:
        monkeypatch.setattr(os, "environ", environment)
        monkeypatch.setattr(sys, "argv", [module])
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(f"{module}.__main__").main()
        return Refused(ended.value.code, capsys.readouterr().err)

    return refusal


@contextmanager
def running(module: str, environment: dict[str, str]):
    """Run a part until it says that it serves."""
    process = subprocess.Popen(
        [sys.executable, "-m", module], env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        lines = (json.loads(line) for line in process.stderr if line.startswith("{"))
        next(line for line in lines if line["event"] in (f"{PARTS[module]} started", "sidecar started"))
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def status_of(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=DEADLINE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode()


@pytest.mark.parametrize("module", PARTS)
def test_wrong_settings_are_told_in_a_line_each_and_without_their_values(tmp_path, module, refusal):
    prefix = PARTS[module].upper()
    wrong = {"METRICS_PORT": "secret-word", "TRACES_SAMPLE_RATIO": "secret-word"}
    result = refusal(module, environment_of(module, tmp_path, **wrong))

    assert result.code == 2
    lines = result.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"{prefix}_TRACES_SAMPLE_RATIO", f"{prefix}_METRICS_PORT"]
    assert "secret-word" not in result.stderr


def test_a_list_that_is_no_json_is_told_in_one_line(tmp_path, refusal):
    result = refusal("kv_sidecar", environment_of("kv_sidecar", tmp_path, PEERS="[secret-word"))

    assert result.code == 2
    assert "peers" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert "secret-word" not in result.stderr


@pytest.mark.parametrize("module", PARTS)
def test_half_of_the_certificate_files_is_refused(tmp_path, module, certificates, refusal):
    environment = environment_of(module, tmp_path, TLS_CERT_FILE=str(certificates.files.cert_file))
    result = refusal(module, environment)

    assert result.code == 2
    assert "belong together" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("gateway", "of another CA"),
        ("context_manager", "missing"),
        ("kv_sidecar", "of another CA"),
        pytest.param("gateway", "missing", marks=pytest.mark.thorough),
        pytest.param("context_manager", "of another CA", marks=pytest.mark.thorough),
        pytest.param("kv_sidecar", "missing", marks=pytest.mark.thorough),
    ],
)
def test_certificate_files_that_cannot_serve_end_the_start_with_the_reason(tmp_path, module, fault, certificates):
    files = certificates.files
    if fault == "missing":
        files.key_file.unlink()
    else:
        certificates.replace(
            files.cert_file.read_bytes(),
            files.key_file.read_bytes(),
            CertificateFiles(tmp_path / "another").files.ca_file.read_bytes(),
        )
    result = run(module, environment_of(module, tmp_path, **certificates.environment))

    assert result.returncode == 1
    told = json.loads(result.stderr.splitlines()[-1])
    assert told["event"] == f"{PARTS[module]} cannot start"
    assert ("tls.key" if fault == "missing" else "other parts would reject") in told["error"]
    assert "Traceback" not in result.stderr


def test_a_wrong_redis_url_ends_the_start_without_its_password(tmp_path):
    result = run("context_manager", environment_of("context_manager", tmp_path, REDIS_URL="redis://u:secret-word@r:x"))

    assert result.returncode == 1
    assert json.loads(result.stderr.splitlines()[-1])["event"] == "manager cannot start"
    assert "secret-word" not in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("module", ["context_manager", "kv_sidecar"])
def test_with_tls_on_probes_and_metrics_stay_plain(tmp_path, module, certificates):
    port = free_port()
    environment = environment_of(module, tmp_path, METRICS_PORT=str(port), **certificates.environment)
    with running(module, environment) as process:
        health, page = status_of(port, "/healthz"), status_of(port, "/metrics")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0

    assert health == (200, "ok\n")
    name = f"contextcache_{PARTS[module]}_certificate_expiry_timestamp_seconds"
    expiry = next(line for line in page[1].splitlines() if line.startswith(f'{name}{{certificate="parts"}} '))
    assert float(expiry.split()[-1]) > 1.7e9


async def test_a_draining_sidecar_is_not_healthy(tmp_path):
    port, listening = free_port(), free_port()
    settings = {"METRICS_PORT": str(port), "LISTEN": f"127.0.0.1:{listening}", "DRAIN_S": "60"}
    with running("kv_sidecar", environment_of("kv_sidecar", tmp_path, **settings)) as process:
        client = KVSidecarClient(f"127.0.0.1:{listening}", timeout_s=DEADLINE_S)
        # It drains for as long as this call waits.
        waiting = asyncio.create_task(client.wait_sealed("demo", "ref_" + "0" * 32, timeout_ms=30_000))
        await asyncio.sleep(0)
        # Later on the same connection: the first has arrived when this is answered.
        await client.stats()
        process.send_signal(signal.SIGTERM)
        found = await until(
            lambda: asyncio.to_thread(status_of, port, "/healthz"),
            is_so=lambda answer: answer[0] != 200,
            what="it drains",
        )
        assert found == (503, "not serving\n")
        process.kill()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await client.close()


async def test_the_port_for_probes_bounds_what_a_caller_can_hold(monkeypatch):
    monkeypatch.setattr("contextcache.process.metrics._CONNECTIONS_MAX", 2)
    monkeypatch.setattr("contextcache.process.metrics._DEADLINE_S", 600)
    pages = {"/healthz": health_page(lambda: True)}
    async with metrics_server("127.0.0.1", 0, registry=CollectorRegistry(), pages=pages) as port:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in held:
            writer.write(b"GET ")
        third = await said(port, b"GET /healthz HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            # The oldest has given way: only so there was room.
            [first] = await asyncio.gather(held[0][0].read(), return_exceptions=True)
        for _, writer in held:
            writer.close()

    assert third.startswith(b"HTTP/1.1 200")
    assert first == b"" or isinstance(first, ConnectionError)


async def said(port: int, request: bytes) -> bytes:
    """Return all that the server says."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_the_port_for_probes_ends_silent_and_endless_requests(monkeypatch):
    monkeypatch.setattr("contextcache.process.metrics._DEADLINE_S", 0.2)
    async with metrics_server("127.0.0.1", 0, registry=CollectorRegistry(), pages={}) as port:
        async with asyncio.timeout(DEADLINE_S):
            silent = await said(port, b"")
            endless = await said(port, b"x" * 100_000)

    assert (silent, endless) == (b"", b"")


async def test_a_page_that_cannot_be_made_is_a_fault_of_ours():
    async def broken() -> ProbePage:
        raise RuntimeError("no")

    async with metrics_server("127.0.0.1", 0, registry=CollectorRegistry(), pages={"/broken": broken}) as port:
        answers = {
            path: await said(port, f"{method} {path} HTTP/1.1\r\n\r\n".encode())
            for method, path in (
                ("GET", "/broken"),
                ("GET", "/other"),
                ("HEAD", "/metrics?x=1"),
                ("DELETE", "/metrics"),
            )
        }
    statuses = [answer.split()[1] for answer in answers.values()]

    assert statuses == [b"500", b"404", b"200", b"405"]
    assert answers["/metrics?x=1"].endswith(b"\r\n\r\n")


async def test_a_port_that_is_taken_is_named():
    async with metrics_server("127.0.0.1", 0, registry=CollectorRegistry(), pages={}) as port:
        with pytest.raises(OSError, match=str(port)):
            async with metrics_server("127.0.0.1", port, registry=CollectorRegistry(), pages={}):
                pass
