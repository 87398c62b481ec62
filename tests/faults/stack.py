"""The real local stack over a tiny float32 model, with every link cuttable and every process at a test's mercy.

Valkey, manager, sidecars, vLLM with plugin, gateway and Envoy, as `make up` starts them. What is faked: nothing. Bytes
on a link that was asked for pass through a Proxy; signals go to the parts' own pids; crash points are armed by a file
that every part watches. One engine is up in 30 to 40 s on two quiet cores, 80 s on busy ones: vLLM imports itself
three times.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from contextcache.crash_points import VARIABLE
from deploy.local import readiness
from deploy.local.parts import LINKS, numbered
from deploy.local.ports import LOOPBACK, PORTS_OF_A_STACK, PortPlan, is_free, plan_ports
from deploy.local.processes import is_alive, session_members
from deploy.local.stack import Stack
from deploy.local.state import API_KEYS, RunningPart, StackPaths, read_state
from tests.faults.proxy import Proxy
from tests.helpers.patience import CONNECTOR, PARTS
from tests.helpers.tiny_model import make_tiny_model

KEY, OTHER_KEY = API_KEYS
"""API keys of the tenants `demo` and `other`."""
MODEL = "smollm2-135m-instruct"
"""What the tiny model is called by clients: the local stack has one name."""
MAX_MODEL_LEN = 2048
ENGINE_BLOCK_TOKENS = 32
BLOCK_TOKENS = 64
"""SIDECAR_BLOCK_TOKENS: two engine blocks, so that a conversation of some hundred tokens meets many edges."""
ENGINE_BLOCKS = 256
"""The engine's whole KV cache: 8 192 tokens, so that a little traffic evicts."""
CLIENT_LINKS = {"client-envoy": "envoy", "client-front": "gateway"}
"""Links of ours to the parts that clients call; `FaultStack.url` and `front_url` follow them."""
_METRICS_PORTS = 4
"""Where in the stack's ports those of the manager's and the sidecars' metrics begin."""
_WITHIN_S = 60.0


class FaultStack:
    """One stack; a context manager. Deadlines are the product's own unless `patient`.

    `proxied` names links (deploy.local.parts.LINKS, numbered from the second engine on, and CLIENT_LINKS).
    """

    def __init__(  # all that differs between stacks, by name
        self,
        directory: Path,
        *,
        engines: int = 1,
        proxied: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        part_env: Mapping[str, Mapping[str, str]] | None = None,
        connector: Mapping[str, int | str] | None = None,
        engine_args: Sequence[str] = (),
        engine_blocks: int = ENGINE_BLOCKS,
        patient: bool = False,
    ) -> None:
        self.directory = directory
        self.crash_file = directory / "crash"
        """Holds the crash point that is armed, while it is."""
        port = _free_plan()
        self._plan = plan_ports(port)
        self.paths = StackPaths((directory / "stack").resolve())
        self.proxies = {name: self._proxy(name) for name in proxied}
        """By link name; only those that were asked for."""
        extra = part_env or {}
        metrics = self._metrics_env(engines)
        self._settings: dict[str, Any] = {
            "port": port,
            "dtype": "float32",
            "engines": engines,
            "dev": True,
            "engine_args": [*_engine_args(engine_blocks), *engine_args],
            "connector": {**(CONNECTOR if patient else {}), **(connector or {})},
            "env": {**self._env(), **(PARTS if patient else {}), **(env or {})},
            "part_env": {part: {**metrics.get(part, {}), **extra.get(part, {})} for part in {**metrics, **extra}},
        }
        self.starts: dict[str, int] = {}
        """How often a test has started each part again; what is not in it runs since the beginning."""
        self.started_in_s = 0.0
        """How long the stack took to come up."""

    def __enter__(self) -> Self:
        """Make the model, start the proxies and all parts; return when the whole answers."""
        began_s = time.monotonic()
        self.directory.mkdir(parents=True, exist_ok=True)
        model = self.directory / "model"
        if not model.exists():
            make_tiny_model(model, max_model_len=MAX_MODEL_LEN)
        try:
            started = {name: proxy.start() for name, proxy in self.proxies.items()}
            links = {name: address for name, address in started.items() if name not in CLIENT_LINKS}
            if "manager-redis" in links:
                links["manager-redis"] = f"redis://{links['manager-redis']}/0"
            self.stack = Stack(self.paths.root, model_dir=model, links=links, **self._settings)
            self.stack.up()
        except BaseException:
            self._close()
            raise
        self._first = read_state(self.paths)
        self.started_in_s = time.monotonic() - began_s
        print(f"fault stack: {len(self.engines)} engine(s) up in {self.started_in_s:.1f} s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End every process and proxy; the directory with the logs stays for whoever made it."""
        self._close()

    @property
    def url(self) -> str:
        """Where clients go: Envoy, through the proxy `client-envoy` where there is one."""
        return self._client_url("client-envoy", self.stack.url)

    @property
    def front_url(self) -> str:
        """The gateway's HTTP front, through the proxy `client-front` where there is one."""
        return self._client_url("client-front", self.stack.front_url)

    @property
    def engine_urls(self) -> list[str]:
        """vLLM itself, past gateway and proxies: for cold answers and `/reset_prefix_cache`."""
        return self.stack.engine_urls

    @property
    def engines(self) -> list[str]:
        """Part names: `engine`, `engine-1`."""
        return self.stack.names_of("engine")

    @property
    def sidecars(self) -> list[str]:
        """Part names: `sidecar`, `sidecar-1`."""
        return self.stack.names_of("sidecar")

    def data(self, sidecar: str = "sidecar") -> Path:
        """Return a sidecar's data directory."""
        return self.paths.sidecar_data(sidecar)

    def shared(self, sidecar: str = "sidecar") -> Path:
        """Return the directory of the tier in shared memory."""
        return self.paths.shared_blocks(sidecar)

    def log(self, part: str) -> str:
        """Return all that a part has logged."""
        return self.paths.log(part).read_text(errors="replace")

    # Processes.

    def pid(self, part: str) -> int:
        """Return the pid of a part's first process, as it was last started."""
        return self._record(part).pid

    def pids(self, part: str) -> list[int]:
        """Return the living processes of a part, its own children among them."""
        return session_members(self._record(part).name)

    def engine_pids(self, engine: str = "engine") -> list[int]:
        """Return vLLM's living processes; what else they start for a moment comes and goes."""
        first = self.pid(engine)
        return [pid for pid in self.pids(engine) if pid == first or _title(pid).startswith("VLLM::")]

    def engine_core_pids(self, engine: str = "engine") -> list[int]:
        """Return the engine core process (and workers): those of the engine that call themselves `VLLM::…`."""
        return [pid for pid in self.pids(engine) if _title(pid).startswith("VLLM::")]

    def stop(self, part: str) -> None:
        """SIGSTOP every process of a part."""
        self._signal(part, signal.SIGSTOP)

    def cont(self, part: str) -> None:
        """SIGCONT every process of a part."""
        self._signal(part, signal.SIGCONT)

    def kill(self, part: str) -> None:
        """SIGKILL every process of a part; return when they are gone."""
        self.stack.kill(part)

    def kill_api_server(self, engine: str = "engine") -> None:
        """SIGKILL vLLM's API server alone; its engine core stays, as long as nobody ends it (vLLM 0.32)."""
        self._kill_one(self.pid(engine))

    def kill_engine_core(self, engine: str = "engine") -> None:
        """SIGKILL the engine core alone; the API server finds out by itself."""
        for pid in self.engine_core_pids(engine):
            self._kill_one(pid)

    def terminate(self, part: str, *, within_s: float = _WITHIN_S) -> float:
        """SIGTERM a part's first process; return the seconds until all of the part is gone."""
        began_s = time.monotonic()
        os.kill(self.pid(part), signal.SIGTERM)
        self.wait_gone(part, within_s=within_s)
        return time.monotonic() - began_s

    def wait_gone(self, part: str, *, within_s: float = _WITHIN_S) -> None:
        """Return when no process of a part lives any more, e.g. at an armed crash point."""
        poll_until(lambda: not self.pids(part), within_s=within_s, what=f"{part} is gone")

    def sweep_out(self, part: str) -> None:
        """Wait until a part's first process is dead and end what it left behind, as it goes with a container."""
        poll_until(lambda: not is_alive(self._record(part).name), within_s=_WITHIN_S, what=f"{part} is dead")
        if self.pids(part):
            self.kill(part)

    def start(self, part: str) -> None:
        """Start a part that is gone, as before; return when it, and the way to it, works."""
        self.stack.start(part)
        self.starts[part] = self.starts.get(part, 0) + 1

    def restart(self, part: str) -> None:
        """SIGKILL and start."""
        self.kill(part)
        self.start(part)

    def mend(self) -> None:
        """Heal every link, let every stopped process run, disarm, start every part that is gone."""
        self.disarm()
        for proxy in self.proxies.values():
            proxy.heal()
        for part in self.stack.part_names:
            self.cont(part)
        for part in self.stack.part_names:
            if not is_alive(self._record(part).name):
                self.start(part)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Return when the gateway and Envoy have seen every engine ready."""

        def is_ready() -> bool:
            known = readiness.gateway_endpoints(self.stack.front_url)
            ready = bool(known) and all(endpoint["ready"] for endpoint in known.values())
            return ready and readiness.HttpReady(f"{self.stack.url}/readyz")()

        poll_until(is_ready, within_s=_WITHIN_S, what="every engine is ready")

    def is_untouched(self, part: str = "engine") -> bool:
        """Return whether a part is the process that came up with the stack, and lives."""
        return self._record(part) == self._first[part] and is_alive(self._record(part).name)

    # Crash points.

    def arm(self, point: str, *, at: int = 1, stop: bool = False) -> None:
        """Let the process that next passes `point` (the `at`-th time) die there, or stand still with `stop`."""
        line = point + (f"@{at}" if at > 1 else "") + (" stop" if stop else "")
        scratch = self.crash_file.with_name("crash.new")
        scratch.write_text(line)
        scratch.rename(self.crash_file)

    def disarm(self) -> bool:
        """Forget the armed point; return whether nobody had passed it."""
        try:
            self.crash_file.unlink()
        except FileNotFoundError:
            return False
        return True

    # What the parts say of themselves.

    def metrics(self, part: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Return a part's metrics, by name and labels; `manager`, a sidecar, `gateway` or an engine."""
        text = httpx.get(self._metrics_url(part), timeout=30).raise_for_status().text
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def counted(self, part: str, name: str, **labels: str) -> float:
        """Return the sum of a part's samples of this name (`_total` and all) with at least these labels."""
        wanted = labels.items()
        return sum(value for (found, its), value in self.metrics(part).items() if found == name and wanted <= its)

    def forget_prefixes(self, urls: Sequence[str] | None = None) -> None:
        """Empty the prefix cache of every engine (or of those named): what is cached then came through a sidecar."""
        for url in self.engine_urls if urls is None else urls:
            poll_until(
                lambda url=url: httpx.post(f"{url}/reset_prefix_cache", timeout=60).json()["success"],  # type: ignore[misc]
                within_s=_WITHIN_S,
                what="the prefix cache is empty",
            )

    def _proxy(self, name: str) -> Proxy:
        """Return the proxy of a link, listening where `start` says; on a Unix socket beside the stack's own."""
        return Proxy(**_ends(name, self._plan, self.paths))

    def _env(self) -> dict[str, str]:
        return {
            VARIABLE: str(self.crash_file),
            "SIDECAR_BLOCK_TOKENS": str(BLOCK_TOKENS),
            "SIDECAR_MEMORY_LIMIT_BYTES": str(256 << 20),
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }

    def _metrics_env(self, engines: int) -> dict[str, dict[str, str]]:
        first = self._plan.envoy + _METRICS_PORTS
        sidecars = {
            numbered("sidecar", number): {"SIDECAR_METRICS_PORT": str(first + 1 + number)} for number in range(engines)
        }
        return {"manager": {"MANAGER_METRICS_PORT": str(first)}, **sidecars}

    def _metrics_url(self, part: str) -> str:
        kind, _, number = part.partition("-")
        first = self._plan.envoy + _METRICS_PORTS
        ports = {
            "manager": first,
            "sidecar": first + 1 + int(number or 0),
            "gateway": self._plan.gateway,
            "engine": self._plan.engine(int(number or 0)),
        }
        return f"http://{LOOPBACK}:{ports[kind]}/metrics"

    def _client_url(self, link: str, direct: str) -> str:
        return f"http://{self.proxies[link].address}" if link in self.proxies else direct

    def _record(self, part: str) -> RunningPart:
        return read_state(self.paths)[part]

    def _signal(self, part: str, number: signal.Signals) -> None:
        for pid in self.pids(part):
            os.kill(pid, number)

    def _kill_one(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def _close(self) -> None:
        if hasattr(self, "stack"):
            for part in read_state(self.paths):
                self.cont(part)
            self.stack.down()
        for proxy in self.proxies.values():
            proxy.close()


def poll_until(condition: Callable[[], Any], *, within_s: float, what: str) -> None:
    """Return at the first true value; a busy machine may be late, so give it time."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {within_s:.0f} s: {what}"
        time.sleep(0.05)


def _engine_args(engine_blocks: int) -> list[str]:
    return ["--max-model-len", str(MAX_MODEL_LEN), "--num-gpu-blocks-override", str(engine_blocks)]


def _ends(link: str, plan: PortPlan, paths: StackPaths) -> dict[str, str]:
    """Return `target` and, on a Unix socket, `listen` of a link's proxy."""
    if link in CLIENT_LINKS:
        ports = {"envoy": plan.envoy, "gateway": plan.gateway}
        return {"target": f"{LOOPBACK}:{ports[CLIENT_LINKS[link]]}"}
    base, number = _parsed(link)
    if base in ("turn-sidecar", "connector-sidecar"):
        socket = paths.sidecar_socket(numbered("sidecar", number))
        # Beside the stack's own directory, which the stack empties when it starts; short, as a socket's path must be.
        listen = socket.parent.with_name(f"{socket.parent.name}-{link}.sock")
        return {"target": f"unix://{socket}", "listen": f"unix://{listen}"}
    ports = {
        "redis": plan.redis,
        "manager": plan.manager,
        "engine": plan.engine(number),
        "sidecar": plan.sidecar(number),
    }
    return {"target": f"{LOOPBACK}:{ports[base.partition('-')[2]]}"}


def _parsed(link: str) -> tuple[str, int]:
    base, _, number = link.rpartition("-")
    base, number = (base, number) if number.isdigit() else (link, "0")
    assert base in LINKS, f"no link is called {link}: {', '.join((*LINKS, *CLIENT_LINKS))}"
    return base, int(number)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _free_plan() -> int:
    """Return a port whose whole plan is free now, below the ports the kernel hands out to clients."""
    while True:
        port = 20_000 + PORTS_OF_A_STACK * secrets.randbelow(600)
        if all(is_free(port + offset) for offset in range(PORTS_OF_A_STACK)):
            return port
