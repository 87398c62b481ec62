"""A real Envoy on free loopback ports, run with the bootstrap that deployments run."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from deploy.local.envoy import envoy_command
from gateway.envoy.render import write_folder
from gateway.envoy.settings import EnvoySettings
from tests.kit.envoy_names import LISTENER, bootstrap
from tests.kit.gateway_parts import LISTED_CALL
from tests.kit.until import until

DEADLINE_S = 90


class RunningEnvoy:
    """One Envoy process that takes requests."""

    def __init__(self, process: asyncio.subprocess.Process, folder: Path, admin: str, http: aiohttp.ClientSession):
        self.process = process
        self.scheme = "http"
        self.admin_url = f"http://{admin}"
        self.port = 0
        self.folder = folder
        self._http = http

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    async def admin(self, path: str, *, method: str = "GET") -> tuple[int, str]:
        """Return status and text of an answer of the admin interface."""
        async with self._http.request(method, self.admin_url + path) as answer:
            return answer.status, await answer.text()

    async def stat(self, name: str) -> int:
        """Return a counter or gauge, 0 when Envoy has none of that name."""
        _, text = await self.admin(f"/stats?filter=^{name}$")
        return int(text.rpartition(":")[2] or 0)

    async def until_stat(self, name: str, value: int) -> None:
        """Wait until a gauge is `value`."""
        await until(lambda: self.stat(name), is_so=lambda seen: seen == value, what=f"{name} is {value}")

    async def until_counted(self, name: str, more: int) -> None:
        """Wait until a counter has grown by `more`; it may be seen only when it has grown further."""
        wanted = await self.stat(name) + more
        await until(lambda: self.stat(name), is_so=lambda seen: seen >= wanted, what=f"{name} is {wanted}")

    async def until_healthy(self, cluster: str, num_healthy: int) -> None:
        """Wait until Envoy takes exactly so many members of a cluster for healthy."""
        await self.until_stat(f"cluster.{cluster}.membership_healthy", num_healthy)

    async def access_log(self, *, num_lines: int) -> list[dict]:
        """Wait until the access log has so many lines and return it."""
        path = self.folder / "access.jsonl"
        text = await until(
            path.read_text,
            is_so=lambda text: text.count("\n") >= num_lines,
            what=f"{num_lines} lines in the access log",
            despite=(FileNotFoundError,),
        )
        return [json.loads(line) for line in text.splitlines()]

    def log(self) -> str:
        """Return what Envoy itself has written."""
        return (self.folder / "envoy.log").read_text()


def envoy_settings(
    *, pods: Sequence[int], gateways: Sequence[tuple[int, int]], engines: Sequence[int] = (), **more
) -> EnvoySettings:
    """Return settings for ports on loopback; a gateway is its HTTP front's port and its processor's.

    Waits are longer than as shipped: most tests are not about them, and a busy machine stands still for seconds.
    """
    patience = {"plugin_timeout_s": 60, "connect_timeout_s": 20}
    return EnvoySettings(
        pods=[f"127.0.0.1:{port}" for port in pods],
        engines=[f"127.0.0.1:{port}" for port in engines],
        gateways=[{"http": f"127.0.0.1:{http}", "ext_proc": f"127.0.0.1:{ext_proc}"} for http, ext_proc in gateways],
        **{"engine_paths": (LISTED_CALL,), **patience, **more},
    )


@asynccontextmanager
async def running_envoy(
    settings: EnvoySettings, *, change: Callable[[dict], dict] = lambda made: made
) -> AsyncIterator[RunningEnvoy]:
    """Run Envoy until the block ends, then end it at once. Ports and access log are its own, not the settings'.

    Keys are those that their file has now. `change` makes another bootstrap of ours: for proxies that others configure.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        updates = {"listen_port": 0, "admin_port": 0, "access_log": str(folder / "access.jsonl"), "config_dir": name}
        settings = settings.model_copy(update=updates)
        config = write_folder(settings)
        config.write_text(json.dumps(change(bootstrap(settings))))
        command = envoy_command(config, "--admin-address-path", str(folder / "admin"), concurrency=1)
        with (folder / "envoy.log").open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                "--file-flush-interval-msec",
                "50",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as http:
                envoy = await _started(process, folder, http)
                envoy.scheme = "https" if settings.listen_cert_file else "http"
                yield envoy
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), DEADLINE_S)
            except TimeoutError:
                process.kill()
                await process.wait()
                raise


async def _started(process: asyncio.subprocess.Process, folder: Path, http: aiohttp.ClientSession) -> RunningEnvoy:
    admin = folder / "admin"

    def address() -> str:
        log = (folder / "envoy.log").read_text()[-4000:]
        assert process.returncode is None, f"Envoy ended with {process.returncode}: {log}"
        return admin.read_text() if admin.exists() else ""

    envoy = RunningEnvoy(process, folder, await until(address, what="Envoy's admin interface"), http)

    async def listeners() -> list[dict]:
        address()
        if (await envoy.admin("/ready"))[0] != 200:
            return []
        return json.loads((await envoy.admin("/listeners?format=json"))[1]).get("listener_statuses", [])

    statuses = await until(listeners, what="Envoy listens")
    envoy.port = next(
        found["local_address"]["socket_address"]["port_value"] for found in statuses if found["name"] == LISTENER
    )
    return envoy
