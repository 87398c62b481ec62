"""compose.yaml without Docker: each service's command runs with its environment on loopback, and a context survives.

Names of services become loopback addresses, mounted paths become folders of the test. The rest is the file's own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.docker.keys import make_keys
from deploy.local.model import MODEL_DIR
from tests.kit.compose import ROOT, read_compose
from tests.kit.ports import free_port
from tests.kit.until import wait_until
from tests.kit.valkey import valkey_binary

pytestmark = pytest.mark.thorough
ORDER = ("valkey", "manager", "sidecar", "turn", "engine-cpu", "gateway")
PORTS = {"valkey": 6379, "manager": 50051, "sidecar": 50061, "turn": 8010, "engine-cpu": 8000, "gateway": 8000}
METRICS = {"manager": 9090, "sidecar": 9091}
_HEALTHY_S = 300.0
_STOP_S = 40.0


class Composed:
    """The services of profile `cpu` as processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.services = read_compose({"MODEL": str(MODEL_DIR), "SIDECAR_MEMORY_BYTES": str(256 << 20)})["services"]
        self.ports = {name: free_port() for name in ORDER}
        self.metrics = {name: free_port() for name in METRICS}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.key = make_keys(folder / ".compose").read_text().strip()
        for name in ("run", "blocks", "models", "data"):
            (folder / name).mkdir()

    def here(self, text: str, service: str) -> str:
        """Return a text of a service with this machine's addresses and paths."""
        for name, port in PORTS.items():
            host = "engine" if name == "engine-cpu" else name
            text = text.replace(f"{host}:{port}", f"127.0.0.1:{self.ports[name]}")
        for where in ("0.0.0.0", "127.0.0.1"):
            text = text.replace(f"{where}:{PORTS[service]}", f"127.0.0.1:{self.ports[service]}")
        if service in METRICS:
            text = text.replace(f"127.0.0.1:{METRICS[service]}", f"127.0.0.1:{self.metrics[service]}")
        text = text.replace(f"--port={PORTS[service]}", f"--port={self.ports[service]}").replace("0.0.0.0", "127.0.0.1")
        paths = {
            "/run/context-cache": "run",
            "/var/lib/context-cache": "blocks",
            "/run/secrets/signing": ".compose/signing",
            "/run/secrets/api-keys": ".compose/api-keys.json",
        }
        for path, own in paths.items():
            text = text.replace(path, str(self.folder / own))
        return str(self.folder / "models") if text == "/models" else text

    def start(self, service: str) -> None:
        """Start a service's command, and wait until its health check passes."""
        found: dict[str, Any] = self.services[service]
        command = [self.here(word, service) for word in self.command(service, found)]
        environment = {name: self.here(str(value), service) for name, value in found.get("environment", {}).items()}
        own = dict.fromkeys(("GATEWAY_PORT", "TURN_LISTEN_PORT"), self.ports[service])
        for variable, port in {"_METRICS_PORT": self.metrics.get(service), **own}.items():
            environment |= {name: str(port) for name in environment if name.endswith(variable)}
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ}
        with (self.folder / f"{service}.log").open("ab") as log:
            self.processes[service] = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**kept, "PYTHONPATH": str(ROOT), "VLLM_HOST_IP": "127.0.0.1", **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if service != "valkey":
            wait_until(
                lambda: self.is_healthy(service), what=f"{service} is healthy: {log.name}", deadline_s=_HEALTHY_S
            )

    def command(self, service: str, found: dict[str, Any]) -> list[str]:
        """Return what a container of the service would run, with the programs of this environment."""
        if service == "valkey":
            own = ["--bind", "127.0.0.1", "--port", str(self.ports[service]), "--dir", str(self.folder / "data")]
            return [str(valkey_binary()), *found["command"][1:], *own]
        if service == "engine-cpu":
            assert found["entrypoint"][0] == "python3"
            return [sys.executable, *found["entrypoint"][1:], *found["command"]]
        return [str(Path(sys.executable).with_name("context-cache")), *found["command"]]

    def is_healthy(self, service: str) -> bool:
        """Run the service's own health check."""
        assert self.processes[service].poll() is None, (self.folder / f"{service}.log").read_text()[-3000:]
        kind, program, *words = self.services[service]["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "python3")
        check = [sys.executable, *(self.here(word, service) for word in words)]
        return subprocess.run(check, capture_output=True, timeout=60, check=False).returncode == 0

    def is_ready(self) -> bool:
        """Return whether the gateway has an engine to send requests to."""
        return httpx.get(f"http://127.0.0.1:{self.ports['gateway']}/readyz", timeout=60).status_code == 200

    def stop(self, service: str, sent: int = signal.SIGTERM) -> None:
        """End a service and all that it started."""
        process = self.processes.pop(service)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(_STOP_S)

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Call the gateway's published port and return its answer."""
        answer = httpx.request(
            method,
            f"http://127.0.0.1:{self.ports['gateway']}{path}",
            json=body,
            headers={"Authorization": f"Bearer {self.key}"},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        read: dict[str, Any] = answer.json()
        return read

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """Have the model answer, and wait until the KV of the turn is stored."""
        answer = self.call("POST", path, {"model": str(MODEL_DIR), "max_tokens": 8, "temperature": 0, **body})
        context = f"/v1/context/{body.get('session_id', answer.get('session_id'))}"
        wait_until(lambda: self.call("GET", context)["holder"]["state"] == "sealed", what="the turn's KV is stored")
        return answer


@pytest.fixture
def composed() -> Iterator[Composed]:
    folder = Path(tempfile.mkdtemp(prefix="cc-"))  # short, as a socket's path has at most 107 bytes
    running = Composed(folder)
    try:
        for service in ORDER:
            running.start(service)
        yield running
    finally:
        for service in reversed(list(running.processes)):
            running.stop(service)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.timeout(900)
def test_the_services_of_the_compose_file_keep_a_context_over_a_kill_of_its_engine(composed):
    prompt = " ".join(f"Sentence number {number} of a long document." for number in range(60))
    wait_until(composed.is_ready, what="the gateway found the engine")
    made = composed.ask("/v1/context", prompt=prompt, ttl=600)
    first = composed.ask("/v1/completions", session_id=made["session_id"], prompt=" And again")

    composed.stop("engine-cpu", signal.SIGKILL)
    composed.start("engine-cpu")
    wait_until(composed.is_ready, what="the gateway found the engine")
    second = composed.ask("/v1/completions", session_id=made["session_id"], prompt=" And once more")

    assert first["usage"]["context"]["cached_tokens"] > 200
    assert second["usage"]["context"]["cached_tokens"] > first["usage"]["context"]["cached_tokens"]
    assert second["usage"]["context"]["computed_tokens"] < 50
    assert second["usage"]["context"]["source"] in {"host", "disk"}
