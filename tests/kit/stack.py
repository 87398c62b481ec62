"""The real local stack, as `make up` starts it, with every link cuttable and every process at a test's mercy.

Valkey, manager, sidecars, vLLM with plugin, gateway and Envoy. What is faked: nothing. Bytes on a link that was asked
for pass through a Proxy (links.py); signals go to the parts' own pids; crash points are armed by a file that every part
watches. Float32, so that a restored answer can be compared with a cold one.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from contextcache.process.crash_points import VARIABLE
from deploy.local import readiness, stack
from deploy.local.parts import Part, numbered
from deploy.local.ports import LOOPBACK, PORTS_OF_A_STACK, PortPlan, plan_ports
from deploy.local.processes import is_alive, session_members
from deploy.local.progress import StepFailed
from deploy.local.settings import StackSettings
from deploy.local.state import API_KEYS, RunningPart, read_state
from tests.kit.links import Links
from tests.kit.patience import CONNECTOR, PARTS
from tests.kit.ports import free_ports
from tests.kit.until import wait_until

KEY, OTHER_KEY, KEEPING_KEY, OPERATOR_KEY = API_KEYS
"""API keys of the tenants `demo` and `other`, and of `keeper`, whose plain requests' KV is kept."""
MODEL = "smollm2-135m-instruct"
"""What clients call the model, SmolLM2 or not: the local stack has one name."""
_START_S = 180.0
"""What any part may take to start while others start."""
_METRICS_PORTS = 5
"""Where in the stack's ports those of the manager's and the sidecars' metrics begin."""


class Stack(stack.Stack):
    """One stack; a context manager. Deadlines are the product's own unless `patient`.

    `proxied` names links (tests.kit.links). `env` is laid over all parts, `part_env` over one, by its name.
    """

    def __init__(  # all that differs between stacks, by name
        self,
        directory: Path,
        *,
        engines: int = 1,
        model_dir: Path | None = None,
        proxied: Iterable[str] = (),
        env: Mapping[str, str] | None = None,
        part_env: Mapping[str, Mapping[str, str]] | None = None,
        connector: Mapping[str, int | str] | None = None,
        engine_args: Sequence[str] = (),
        patient: bool = False,
    ) -> None:
        self.directory = directory
        self.crash_file = directory / "crash"
        """Holds the crash point that is armed, while it is."""
        self._plan = plan_ports(free_ports(PORTS_OF_A_STACK))
        super().__init__(
            directory / "stack",
            port=self._plan.envoy,
            dtype="float32",
            engines=engines,
            model_dir=model_dir,
            dev=True,
            engine_args=engine_args,
            env={VARIABLE: str(self.crash_file), **(PARTS if patient else {}), **(env or {})},
            connector={**(CONNECTOR if patient else {}), **(connector or {})},
        )
        self.links = Links(self._plan, self.paths, proxied)
        self._part_env = _metrics_env(self._plan, engines)
        for part, extra in (part_env or {}).items():
            self._part_env.setdefault(part, {}).update(extra)
        self.starts: dict[str, int] = {}
        """How often a test has started each part again; what is not in it runs since the beginning."""
        self.started_in_s = 0.0
        """How long the stack took to come up."""

    def __enter__(self) -> Self:
        """Start the proxies and all parts; return when the whole answers."""
        began_s = time.monotonic()
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self.links.start()
            self.up()
        except BaseException:
            self.close()
            raise
        self._first = read_state(self.paths)
        self.started_in_s = time.monotonic() - began_s
        print(f"stack: {len(self.engines)} engine(s) up in {self.started_in_s:.1f} s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End every process and proxy; the directory with the logs stays for whoever made it."""
        self.close()

    def close(self) -> None:
        for part in read_state(self.paths):
            self.cont(part)
        self.down()
        self.links.close()

    def _table(self, settings: StackSettings) -> dict[str, Part]:
        parts = {name: self.links.overlaid(part) for name, part in super()._table(settings).items()}
        for name, extra in self._part_env.items():
            parts[name].env.update(extra)  # type: ignore[attr-defined]  # a dict of this call's own
        for part in [part for part in parts.values() if "SIDECAR_BOUNDS" in part.env and part.kind == "sidecar"]:
            parts[part.name] = replace(part, command=(sys.executable, "-m", "tests.kit.bounded_sidecar"))
        return {name: replace(part, ready_within_s=max(part.ready_within_s, _START_S)) for name, part in parts.items()}

    def _endpoints(self, settings: StackSettings) -> list[dict[str, Any]]:
        return self.links.endpoints(super()._endpoints(settings))

    @property
    def url(self) -> str:
        """Where clients go: Envoy, through the proxy `client-envoy` where there is one."""
        return self.links.client_url("client-envoy", super().url)

    @property
    def front_url(self) -> str:
        """The gateway's HTTP front, through the proxy `client-front` where there is one."""
        return self.links.client_url("client-front", super().front_url)

    @property
    def engines(self) -> list[str]:
        """Part names: `engine`, `engine-1`."""
        return self.names_of("engine")

    @property
    def sidecars(self) -> list[str]:
        """Part names: `sidecar`, `sidecar-1`."""
        return self.names_of("sidecar")

    def data(self, sidecar: str = "sidecar") -> Path:
        """Return a sidecar's data directory."""
        return self.paths.sidecar_data(sidecar)

    def stored_bytes(self) -> int:
        """Return the bytes of block, tail and manifest files on all sidecars' disks."""
        return sum(self.stored_files().values())

    def stored_files(self) -> dict[str, int]:
        """Return the size of each of them, by its path below the stack's data."""
        kinds = ("blocks", "tails", "manifests")
        folders = [self.data(name) / kind for name in self.sidecars for kind in kinds]
        sizes = {str(file.relative_to(self.directory)): _size_bytes(file) for at in folders for file in at.rglob("*")}
        return {file: size_bytes for file, size_bytes in sizes.items() if size_bytes}

    def wait_nothing_stored(self) -> None:
        """Return when no sidecar's disk holds KV; what is left is named at the deadline."""
        wait_until(self.stored_files, what="nothing is stored", is_so=lambda files: not files)

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

    def kill_api_server(self, engine: str = "engine") -> None:
        """SIGKILL vLLM's API server alone; its engine core stays, as long as nobody ends it (vLLM 0.32)."""
        os.kill(self.pid(engine), signal.SIGKILL)

    def kill_engine_core(self, engine: str = "engine") -> None:
        """SIGKILL the engine core alone; the API server finds out by itself."""
        for pid in self.engine_core_pids(engine):
            os.kill(pid, signal.SIGKILL)

    def terminate(self, part: str) -> float:
        """SIGTERM a part's first process; return the seconds until all of the part is gone."""
        began_s = time.monotonic()
        os.kill(self.pid(part), signal.SIGTERM)
        self.wait_gone(part)
        return time.monotonic() - began_s

    def wait_gone(self, part: str, *, deadline_s: float = 60) -> None:
        """Return when no process of a part lives any more, e.g. at an armed crash point."""
        wait_until(lambda: not self.pids(part), what=f"{part} is gone", deadline_s=deadline_s)

    def sweep_out(self, part: str) -> None:
        """Wait until a part's first process is dead and end what it left behind, as it goes with a container."""
        wait_until(lambda: not is_alive(self._record(part).name), what=f"{part} is dead")
        with suppress(StepFailed):  # the last of them ended by itself
            self.kill(part)

    def start(self, name: str, **env: str) -> None:
        """Start a part that is gone, from now on with `env` laid over its environment; return when the way works."""
        self._part_env.setdefault(name, {}).update(env)
        super().start(name)
        self.starts[name] = self.starts.get(name, 0) + 1

    def restart(self, part: str, **env: str) -> None:
        """SIGKILL and start."""
        self.kill(part)
        self.start(part, **env)

    def mend(self) -> None:
        """Heal every link, let every stopped process run, disarm, start every part that is gone."""
        self.disarm()
        self.links.heal()
        for part in self.part_names:
            self.cont(part)
        for part in self.part_names:
            if not is_alive(self._record(part).name):
                self.start(part)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Return when the gateway and Envoy have seen every engine ready."""
        ready = readiness.HttpReady(f"{super().url}/readyz")

        def is_ready() -> bool:
            known = self.gateway_endpoints()
            return bool(known) and all(endpoint["ready"] for endpoint in known.values()) and ready()

        wait_until(is_ready, what="every engine is ready")

    def wait_known_gone(self, engine: str) -> None:
        """Return when the gateway knows that an engine is not there."""

        def is_gone() -> bool:
            # Empty when the gateway was too busy to answer.
            known = {self.engine_named(name): state for name, state in self.gateway_endpoints().items()}
            return engine in known and not known[engine]["ready"]

        wait_until(is_gone, what=f"the gateway knows that {engine} is gone", deadline_s=90)

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
        """Return a part's metrics, by name and labels; `manager`, a sidecar, `gateway`, an engine or its `turn`."""
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
            wait_until(
                lambda url=url: httpx.post(f"{url}/reset_prefix_cache", timeout=60).json()["success"],  # type: ignore[misc]
                what="the prefix cache is empty",
            )

    def _metrics_url(self, part: str) -> str:
        kind, _, number = part.partition("-")
        first = self._plan.envoy + _METRICS_PORTS
        ports = {
            "manager": first,
            "sidecar": first + 1 + int(number or 0),
            "gateway": self._plan.gateway_metrics,
            "engine": self._plan.engine(int(number or 0)),
            "turn": self._plan.turn(int(number or 0)),
        }
        return f"http://{LOOPBACK}:{ports[kind]}/metrics"

    def _record(self, part: str) -> RunningPart:
        return read_state(self.paths)[part]

    def _signal(self, part: str, number: signal.Signals) -> None:
        for pid in self.pids(part):
            os.kill(pid, number)


def _metrics_env(plan: PortPlan, engines: int) -> dict[str, dict[str, str]]:
    first = plan.envoy + _METRICS_PORTS
    sidecars = {
        numbered("sidecar", number): {"SIDECAR_METRICS_PORT": str(first + 1 + number)} for number in range(engines)
    }
    return {"manager": {"MANAGER_METRICS_PORT": str(first)}, **sidecars}


def _size_bytes(file: Path) -> int:
    """Return a file's size; 0 for what is no file, or no more."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
