"""The stack as one thing: `up`, `down`, `kill`, `start`, `drain`, `status`, `clean`. Read this first.

Parts are started in order, each kind awaited before the next; whatever goes wrong on the way, those started by this
call are stopped again. One change at a time: a lock in the stack's directory. Each process leads its own session
and outlives the caller; `state.json` says which they are.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from deploy.envoy.bootstrap import bootstrap
from deploy.envoy.routes import PODS
from deploy.local import readiness
from deploy.local.model import MODEL_DIR, ROOT, prepare_model
from deploy.local.parts import (
    Part,
    StackSettings,
    endpoint_name,
    endpoints_of,
    envoy_settings,
    host_memory_bytes,
    part_names,
    stack_parts,
)
from deploy.local.ports import DEFAULT_PORT, LOOPBACK, MAX_ENGINES, check_ports_free
from deploy.local.processes import (
    is_alive,
    kill_session,
    name_of,
    session_members,
    start_process,
    stop_session,
)
from deploy.local.progress import Step, StepFailed, last_line, log_excerpt, say
from deploy.local.state import (
    RunningPart,
    StackPaths,
    make_secrets,
    mark_draining,
    read_settings,
    read_state,
    write_endpoints,
    write_part,
    write_settings,
)

DEFAULT_DIRECTORY = ROOT / ".stack"
NEEDED_DISK_BYTES = 2 << 30
SEEN_WITHIN_S = 60.0
"""The gateway and Envoy look at the pods once a second, more rarely at those that were away."""
_POLL_S = 0.2
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
    """One local stack. What is not given is taken from its last start, else from the defaults.

    `env` is laid over every part's environment; `engine_args` are appended to vLLM's command line; `connector` is more
    of its `kv_connector_extra_config`; `links` and `part_env` as StackSettings has them.
    """

    def __init__(  # noqa: PLR0913  # all that differs between stacks, by name
        self,
        directory: Path = DEFAULT_DIRECTORY,
        *,
        port: int | None = None,
        dtype: str | None = None,
        engines: int | None = None,
        model_dir: Path | None = None,
        dev: bool | None = None,
        engine_args: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        connector: Mapping[str, int | str] | None = None,
        links: Mapping[str, str] | None = None,
        part_env: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        if engines is not None and not 1 <= engines <= MAX_ENGINES:
            raise StepFailed(f"ENGINES={engines} is out of range: 1 to {MAX_ENGINES}")
        self.paths = StackPaths(directory.resolve())
        self._asked: dict[str, Any] = {
            "port": port,
            "dtype": dtype,
            "engines": engines,
            "model_dir": None if model_dir is None else str(model_dir),
            "dev": dev,
            "engine_args": None if engine_args is None else list(engine_args),
            "env": None if env is None else dict(env),
            "connector": None if connector is None else dict(connector),
            "links": None if links is None else dict(links),
            "part_env": None if part_env is None else {part: dict(env) for part, env in part_env.items()},
        }
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """Where clients go: Envoy."""
        return self._parts()["envoy"].url

    @property
    def front_url(self) -> str:
        """The gateway's HTTP front, past Envoy."""
        return self._parts()["gateway"].url

    @property
    def engine_urls(self) -> list[str]:
        """The URLs of vLLM itself, past the gateway, in the order of the engines' numbers."""
        return [self._parts()[name].url for name in self.names_of("engine")]

    def names_of(self, kind: str) -> list[str]:
        """Return the names of the parts of one kind, in the order of their numbers."""
        return [part.name for part in self._parts().values() if part.kind == kind]

    def engine_named(self, endpoint: str) -> str:
        """Return the part that the gateway knows as `endpoint`."""
        return next(name for number, name in enumerate(self.names_of("engine")) if endpoint_name(number) == endpoint)

    @property
    def part_names(self) -> tuple[str, ...]:
        """All parts in start order."""
        return part_names(self._settings().engines)

    def is_up(self) -> bool:
        """Return whether every part runs (ready or not)."""
        state = read_state(self.paths)
        return all(name in state and is_alive(state[name].name) for name in self.part_names)

    def up(self, names: Sequence[str] | None = None) -> None:
        """Start what does not run and return when all of `names` (None: all parts) are ready. Raises StepFailed.

        On failure or Ctrl-C the parts that this call started are stopped.
        """
        with self._locked():
            running = self._running()
            if running:
                self._refuse_other_settings()
            settings = self._settings(remembered=bool(running))
            wanted = part_names(settings.engines) if names is None else names
            missing = [name for name in wanted if name not in running]
            if not missing:
                say(f"already up: {self.url}")
                return
            say(f"starting {', '.join(missing)} (logs: {self.paths.log('*')})")
            prepared = prepare_model(settings.model_dir) if settings.model_dir == MODEL_DIR else settings.model_dir
            assert prepared == settings.model_dir
            self._prepare_directories(settings, fresh=not running)
            write_settings(self.paths, self._setting_values(remembered=bool(running)))
            parts = {part.name: part for part in stack_parts(settings)}
            for name in missing:
                self._clear(name)
            check_ports_free([(name, port) for name in missing for port in parts[name].ports])
            self._start_all([parts[name] for name in missing])

    def start(self, name: str) -> None:
        """Start one part that was killed or died, the way it was started before. Raises StepFailed."""
        part = self._known(name)
        with self._locked():
            if name in self._running():
                say(f"{name} runs already: {part.url}")
                return
            if not read_state(self.paths):
                raise StepFailed("the stack is not up; `make up` starts all of it")
            self._clear(name)
            check_ports_free([(name, port) for port in part.ports])
            self._start_all([part])

    def kill(self, name: str) -> None:
        """SIGKILL a part with every process it forked; return when they are gone. Raises StepFailed."""
        self._known(name)
        with self._locked():
            record = read_state(self.paths).get(name)
            if record is None or not session_members(record.name):
                raise StepFailed(f"{name} does not run")
            kill_session(record.name, child=self._children.pop(name, None))
            say(f"killed {name} (pid {record.pid}) and all it forked")

    def drain(self, name: str, *, draining: bool = True) -> None:
        """Give an engine no new work (or give it work again); return when the gateway knows. Raises StepFailed.

        Turns of the contexts it holds move: the other engine's sidecar fetches their KV.
        """
        part = self._known(name)
        if part.kind != "engine":
            raise StepFailed(f"{name} is no engine: only engines drain")
        with self._locked():
            gateway = self._parts()["gateway"]
            if gateway.name not in self._running():
                raise StepFailed("the gateway does not run")
            endpoint = endpoint_name(self.names_of("engine").index(name))
            mark_draining(self.paths, endpoint, draining=draining)

            def is_known() -> bool:
                known = readiness.gateway_endpoints(gateway.url).get(endpoint) or {}
                return known.get("draining") is draining

            what = f"{name} {'gets no new work' if draining else 'gets work again'}"
            self._await(what, is_known, otherwise=f"the gateway did not take {endpoint}'s change", log=gateway.name)

    def down(self) -> None:
        """Stop every part in reverse order and remove all but logs and data. Safe to call at any time."""
        with self._locked():
            state = read_state(self.paths)
            if not any(session_members(record.name) for record in state.values()):
                say("nothing runs")
            for name in reversed(state):
                self._stop(name, state[name])
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

    def _start_all(self, parts: Sequence[Part]) -> None:
        started: list[str] = []
        try:
            for _, alike in groupby(parts, key=lambda part: part.kind):
                launched: list[tuple[Part, subprocess.Popen[bytes]]] = []
                for part in alike:
                    started.append(part.name)
                    launched.append((part, self._launch(part)))
                for part, child in launched:
                    self._await_part(part, child)
            self._await_traffic()
        except BaseException:
            self._undo(started)
            raise

    def _await_traffic(self) -> None:
        """Wait until gateway and Envoy, where they ran before, have seen what was started."""
        if not self.is_up():
            return
        parts = self._parts()
        gateway, envoy, settings = parts["gateway"], parts["envoy"], self._settings()
        endpoints = endpoints_of(settings)

        def gateway_sees() -> bool:
            known = readiness.gateway_endpoints(gateway.url)
            return gateway.is_ready() and all(known.get(entry["name"], {}).get("ready") for entry in endpoints)

        def envoy_sees() -> bool:
            healthy = readiness.envoy_hosts(f"http://{LOOPBACK}:{settings.ports.envoy_admin}", PODS)
            return envoy.is_ready() and len(healthy) == len(endpoints)

        for part, sees in ((gateway, gateway_sees), (envoy, envoy_sees)):
            self._await(f"{part.name} sees it", sees, otherwise=f"{part.name} finds an engine missing", log=part.name)

    def _await(self, what: str, condition: Callable[[], bool], *, otherwise: str, log: str) -> None:
        if condition():
            return
        with Step(what) as step:
            while not condition():
                if step.elapsed_s > SEEN_WITHIN_S:
                    raise StepFailed(f"{otherwise}; {log_excerpt(self.paths.log(log))}")
                time.sleep(_POLL_S)

    def _undo(self, started: Sequence[str]) -> None:
        say("stopping what was started (Ctrl-C: kill it)")
        state = read_state(self.paths)
        records = {name: state[name] for name in reversed(started) if name in state}
        try:
            for name, record in records.items():
                self._stop(name, record)
        except KeyboardInterrupt:
            for name, record in records.items():
                kill_session(record.name, child=self._children.pop(name, None))
        if not self._running():
            self._forget()

    def _forget(self) -> None:
        self.paths.state.unlink(missing_ok=True)
        shutil.rmtree(self.paths.run, ignore_errors=True)

    def _launch(self, part: Part) -> subprocess.Popen[bytes]:
        child = start_process(part.command, env=part.env, cwd=ROOT, log=self.paths.log(part.name))
        self._children[part.name] = child
        name = name_of(child.pid)
        write_part(self.paths, part.name, RunningPart(name.pid, part.url, name.started))
        return child

    def _clear(self, name: str) -> None:
        """End what a leader that died left behind: it may hold the part's port."""
        if (before := read_state(self.paths).get(name)) is not None:
            kill_session(before.name)
            # A leader whose threads are still ending counts as dead, and listens: reaped, it does not.
            self._reap(name)

    def _await_part(self, part: Part, child: subprocess.Popen[bytes]) -> None:
        log = self.paths.log(part.name)
        with Step(f"{part.name} on {part.url}") as step:
            while not part.is_ready():
                if child.poll() is not None:
                    raise StepFailed(f"{part.name} ended with exit {child.returncode}; {log_excerpt(log)}")
                if step.elapsed_s > part.ready_within_s:
                    waited = f"{part.name} is not ready after {part.ready_within_s:.0f} s"
                    raise StepFailed(f"{waited}; {log_excerpt(log)}")
                step.beat(lambda: last_line(log))
                time.sleep(_POLL_S)

    def _stop(self, name: str, record: RunningPart) -> None:
        if not session_members(record.name):
            self._reap(name)
            return
        with Step(f"stopping {name}"):
            part = self._parts().get(name)
            grace_s = _LEFTOVER_GRACE_S if part is None else part.grace_s
            if not stop_session(record.name, grace_s=grace_s, child=self._children.pop(name, None)):
                say(f"    {name} did not end within {grace_s:.0f} s and was killed")

    def _reap(self, name: str) -> None:
        if (child := self._children.pop(name, None)) is not None:
            child.wait()  # it has ended: this only collects its exit status

    def _running(self) -> dict[str, RunningPart]:
        """Return the parts that live; a record of a process that is gone counts for nothing."""
        state = read_state(self.paths)
        return {name: record for name, record in state.items() if is_alive(record.name)}

    def _refuse_other_settings(self) -> None:
        remembered = read_settings(self.paths)
        for key, value in self._asked.items():
            if value is not None and key in remembered and value != remembered[key]:
                raise StepFailed(f"already up with {key} {remembered[key]}, not {value}: `make down` first")

    def _setting_values(self, *, remembered: bool) -> dict[str, Any]:
        defaults = {
            "port": DEFAULT_PORT,
            "dtype": "bfloat16",
            "engines": 1,
            "model_dir": str(MODEL_DIR),
            "dev": False,
            "engine_args": [],
            "env": {},
            "connector": {},
            "links": {},
            "part_env": {},
        }
        last = read_settings(self.paths) if remembered else {}
        return defaults | last | {key: value for key, value in self._asked.items() if value is not None}

    def _settings(self, *, remembered: bool = True) -> StackSettings:
        values = self._setting_values(remembered=remembered)
        return StackSettings(
            paths=self.paths,
            model_dir=Path(values["model_dir"]),
            port=int(values["port"]),
            dtype=str(values["dtype"]),
            engines=int(values["engines"]),
            dev=bool(values["dev"]),
            engine_args=tuple(values["engine_args"]),
            env=values["env"],
            connector=values["connector"],
            links=values["links"],
            part_env=values["part_env"],
        )

    def _parts(self) -> dict[str, Part]:
        return {part.name: part for part in stack_parts(self._settings())}

    def _known(self, name: str) -> Part:
        parts = self._parts()
        if name not in parts:
            raise StepFailed(f"no part is called {name!r}; PART= one of {', '.join(parts)}")
        return parts[name]

    def _prepare_directories(self, settings: StackSettings, *, fresh: bool) -> None:
        paths = self.paths
        free = shutil.disk_usage(paths.root).free
        if free < NEEDED_DISK_BYTES:
            raise StepFailed(f"{free / 2**30:.1f} GiB free under {paths.root}; about 2 GiB are needed for KV and logs")
        if fresh:
            shutil.rmtree(paths.run, ignore_errors=True)  # of a stack that was killed
        sidecars = [name for name in part_names(settings.engines) if name.startswith("sidecar")]
        for directory in (paths.data / "redis", paths.root / "logs", *map(paths.sidecar_data, sidecars)):
            directory.mkdir(parents=True, exist_ok=True)
        paths.run.mkdir(mode=0o700, exist_ok=True)
        for directory in (paths.scratch, *map(paths.shared_blocks, sidecars)):
            directory.mkdir(mode=0o700, exist_ok=True)
        make_secrets(paths)
        if fresh:  # later a drained engine stays drained
            write_endpoints(paths, endpoints_of(settings))
        paths.envoy.write_text(yaml.safe_dump(bootstrap(envoy_settings(settings)), sort_keys=False))
        if not host_memory_bytes(paths.shared_memory_free, sidecars=settings.engines):
            say("  /dev/shm is too small to share KV through it (512 MiB an engine do): it travels in gRPC frames")
            say("  (a container gets more with --shm-size=2g)")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.paths.root.mkdir(parents=True, exist_ok=True)
        with self.paths.lock.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say("  another make call is changing this stack; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield
