"""The stack as one thing: `up`, `down`, `kill`, `start`, `drain`, `status`, `clean`. Read this first.

Parts are started in order, each kind awaited before the next; whatever goes wrong on the way, those started by this
call are stopped again. One change at a time: a lock in the stack's directory. Each process leads its own session
and outlives the caller; `state.json` says which they are.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local import readiness
from deploy.local.model import MODEL_DIR, ROOT, prepare_model
from deploy.local.parts import Part, part_names, stack_parts
from deploy.local.paths import StackPaths
from deploy.local.pods import endpoint_name, endpoints_of
from deploy.local.ports import LOOPBACK, MAX_ENGINES, check_ports_free
from deploy.local.processes import is_alive, session_members
from deploy.local.progress import Step, StepFailed, log_excerpt, say
from deploy.local.settings import StackSettings
from deploy.local.starting import POLL_S, PartProcesses
from deploy.local.state import (
    RunningPart,
    make_secrets,
    mark_draining,
    read_settings,
    read_state,
    write_endpoints,
    write_settings,
)

DEFAULT_DIRECTORY = ROOT / ".stack"
SEEN_WITHIN_S = 60.0
"""The gateway and Envoy look at the pods once a second, more rarely at those that were away."""
_LEFTOVER_GRACE_S = 10.0
"""For a part of an earlier start that this one does not have."""


@dataclass(frozen=True, slots=True)
class PartStatus:
    """What `make status` shows of one part."""

    name: str
    state: str
    """`ready`, `starting` (runs, does not answer yet), `dead` (was started, is gone) or `stopped`."""
    pid: int | None
    url: str
    log: Path


class Stack:
    """One local stack."""

    def __init__(self, directory: Path = DEFAULT_DIRECTORY, **asked: Any) -> None:
        """`asked`: fields of StackSettings. The last start decides on those that are absent or None, else the defaults.

        Raises StepFailed, or ValueError for an unknown field or another type.
        """
        self.paths = StackPaths(directory.resolve())
        given = {name: value for name, value in asked.items() if value is not None}
        settings = StackSettings(paths=self.paths, **given)
        if not 1 <= settings.engines <= MAX_ENGINES:
            raise StepFailed(f"ENGINES={settings.engines} is out of range: 1 to {MAX_ENGINES}")
        self._asked = settings.model_dump(mode="json", include=set(given))
        self._processes = PartProcesses(self.paths)

    @property
    def url(self) -> str:
        """Where clients go: Envoy."""
        return self._parts()["envoy"].url

    @property
    def front_url(self) -> str:
        """The gateway's HTTP front, past Envoy."""
        return self._parts()["gateway"].url

    @property
    def gateway_metrics_url(self) -> str:
        """The gateway's metrics port, which says how each pod is."""
        return f"http://{LOOPBACK}:{self._settings().ports.gateway_metrics}"

    def gateway_endpoints(self) -> dict[str, dict[str, Any]]:
        """Return what the gateway knows of its pods; empty when it does not answer."""
        return readiness.gateway_endpoints(self.gateway_metrics_url)

    @property
    def engine_urls(self) -> list[str]:
        """The URLs of vLLM itself, past the gateway, in the order of the engines' numbers."""
        return [self._parts()[name].url for name in self.names_of("engine")]

    @property
    def turn_urls(self) -> list[str]:
        """The URLs of the turn processes, in the order of the engines' numbers."""
        return [self._parts()[name].url for name in self.names_of("turn")]

    def names_of(self, kind: str) -> list[str]:
        """Return the names of the parts of one kind, in the order of their numbers."""
        return [part.name for part in self._parts().values() if part.kind == kind]

    def engine_named(self, endpoint: str) -> str:
        """Return the part that the gateway knows as `endpoint`."""
        return next(name for number, name in enumerate(self.names_of("engine")) if endpoint_name(number) == endpoint)

    @property
    def part_names(self) -> tuple[str, ...]:
        """All parts in start order."""
        settings = self._settings()
        return part_names(settings.engines, settings.store)

    def is_up(self) -> bool:
        """Return whether every part runs (ready or not)."""
        state = read_state(self.paths)
        return all(name in state and is_alive(state[name].name) for name in self.part_names)

    def up(self, names: Sequence[str] | None = None) -> None:
        """Start what does not run and return when all of `names` (None: all parts) are ready. Raises StepFailed.

        On failure or Ctrl-C the parts that this call started are stopped.
        """
        with self.paths.locked():
            running = self._processes.living()
            if running:
                self._refuse_other_settings()
            settings = self._settings(remembered=bool(running))
            wanted = part_names(settings.engines, settings.store) if names is None else names
            missing = [name for name in wanted if name not in running]
            if not missing:
                say(f"already running: {self.url}")
                return
            say(f"starting {', '.join(missing)} (logs: {self.paths.log('*')})")
            prepared = prepare_model(settings.model_dir) if settings.model_dir == MODEL_DIR else settings.model_dir
            assert prepared == settings.model_dir
            self._prepare(settings, fresh=not running)
            write_settings(self.paths, settings.model_dump(mode="json"))
            parts = self._table(settings)
            for name in missing:
                self._processes.clear(name)
            check_ports_free([(name, port) for name in missing for port in parts[name].ports])
            self._start([parts[name] for name in missing])

    def start(self, name: str) -> None:
        """Start one part that was killed or died, the way it was started before. Raises StepFailed."""
        part = self._known(name)
        with self.paths.locked():
            if name in self._processes.living():
                say(f"{name} already runs: {part.url}")
                return
            if not read_state(self.paths):
                raise StepFailed("the stack is not running: start it with `make up`")
            self._processes.clear(name)
            check_ports_free([(name, port) for port in part.ports])
            self._start([part])

    def kill(self, name: str) -> None:
        """SIGKILL a part with every process it forked; return when they are gone. Raises StepFailed."""
        self._known(name)
        with self.paths.locked():
            record = read_state(self.paths).get(name)
            if record is None or not session_members(record.name):
                raise StepFailed(f"{name} does not run")
            self._processes.kill(name, record)
            say(f"killed {name} (pid {record.pid}) and its child processes")

    def drain(self, name: str, *, draining: bool = True) -> None:
        """Give an engine no new work (or give it work again); return when the gateway knows. Raises StepFailed.

        Turns of the contexts it holds move: the other engine's sidecar fetches their KV.
        """
        part = self._known(name)
        if part.kind != "engine":
            raise StepFailed(f"{name} is not an engine: only engines drain")
        with self.paths.locked():
            gateway = self._parts()["gateway"]
            if gateway.name not in self._processes.living():
                raise StepFailed("the gateway does not run")
            endpoint = endpoint_name(self.names_of("engine").index(name))
            mark_draining(self.paths, endpoint, draining=draining)

            def is_known() -> bool:
                known = self.gateway_endpoints().get(endpoint) or {}
                return known.get("draining") is draining

            what = f"{name} {'gets no new turns' if draining else 'gets turns again'}"
            self._await(what, is_known, otherwise=f"the gateway did not take {endpoint}'s change", log=gateway.name)

    def down(self) -> None:
        """Stop every part in reverse order and remove all but logs and data. Safe to call at any time."""
        with self.paths.locked():
            state = read_state(self.paths)
            if not any(session_members(record.name) for record in state.values()):
                say("nothing runs")
            parts = self._parts()
            for name in reversed(state):
                grace_s = parts[name].grace_s if name in parts else _LEFTOVER_GRACE_S
                self._processes.stop(name, state[name], grace_s=grace_s)
            self._forget()

    def clean(self) -> None:
        """Stop everything and remove the stack's directory: sessions, KV, logs, secrets."""
        if not self.paths.root.exists():
            return
        self.down()
        shutil.rmtree(self.paths.root)

    def status(self) -> list[PartStatus]:
        """Return every part as it is now."""
        state = read_state(self.paths)
        parts = self._parts()
        return [self._status(part, state.get(name)) for name, part in parts.items()]

    def _status(self, part: Part, record: RunningPart | None) -> PartStatus:
        log = self.paths.log(part.name)
        if record is None:
            return PartStatus(part.name, "stopped", None, part.url, log)
        if not is_alive(record.name):
            return PartStatus(part.name, "dead", None, record.url, log)
        return PartStatus(part.name, "ready" if part.is_ready() else "starting", record.pid, record.url, log)

    def _start(self, parts: Sequence[Part]) -> None:
        try:
            self._processes.start(parts, self._await_traffic)
        except BaseException:
            if not self._processes.living():
                self._forget()
            raise

    def _await_traffic(self) -> None:
        """Wait until gateway and Envoy, where they ran before, have seen what was started."""
        if not self.is_up():
            return
        parts = self._parts()
        gateway, envoy, settings = parts["gateway"], parts["envoy"], self._settings()
        endpoints = self._endpoints(settings)

        def gateway_sees() -> bool:
            known = self.gateway_endpoints()
            return gateway.is_ready() and all(known.get(entry["name"], {}).get("ready") for entry in endpoints)

        def envoy_sees() -> bool:
            healthy = readiness.envoy_hosts(f"http://{LOOPBACK}:{settings.ports.envoy_admin}", "pods")
            return envoy.is_ready() and len(healthy) == 2 * len(endpoints)  # vLLM and the turn process

        for part, sees in ((gateway, gateway_sees), (envoy, envoy_sees)):
            self._await(
                f"{part.name} sees all engines", sees, otherwise=f"{part.name} does not see all engines", log=part.name
            )

    def _await(self, what: str, condition: Callable[[], bool], *, otherwise: str, log: str) -> None:
        if condition():
            return
        with Step(what) as step:
            while not condition():
                if step.elapsed_s > SEEN_WITHIN_S:
                    raise StepFailed(f"{otherwise}; {log_excerpt(self.paths.log(log))}")
                time.sleep(POLL_S)

    def _forget(self) -> None:
        self.paths.state.unlink(missing_ok=True)
        self.paths.remove_run()

    def _refuse_other_settings(self) -> None:
        remembered = read_settings(self.paths)
        for key, value in self._asked.items():
            if key in remembered and value != remembered[key]:
                raise StepFailed(f"the stack runs with {key} {remembered[key]}, not {value}: run `make down` first")

    def _settings(self, *, remembered: bool = True) -> StackSettings:
        last = read_settings(self.paths) if remembered else {}
        known = {name: value for name, value in last.items() if name in StackSettings.model_fields}
        return StackSettings(paths=self.paths, **known | self._asked)

    def _parts(self) -> dict[str, Part]:
        return self._table(self._settings())

    def _table(self, settings: StackSettings) -> dict[str, Part]:
        """Return all parts by name, in start order."""
        return {part.name: part for part in stack_parts(settings)}

    def _endpoints(self, settings: StackSettings) -> list[dict[str, Any]]:
        """Return the pods as gateway and Envoy are told of them."""
        return endpoints_of(settings)

    def _known(self, name: str) -> Part:
        parts = self._parts()
        if name not in parts:
            raise StepFailed(f"no part is named {name!r}; PART must be one of {', '.join(parts)}")
        return parts[name]

    def _prepare(self, settings: StackSettings, *, fresh: bool) -> None:
        """Make directories, secrets and what the gateway reads."""
        sidecars = [name for name in part_names(settings.engines) if name.startswith("sidecar")]
        self.paths.make(sidecars, fresh=fresh)
        make_secrets(self.paths)
        if fresh:  # later a drained engine stays drained
            write_endpoints(self.paths, self._endpoints(settings))
