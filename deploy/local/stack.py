"""The stack as one thing: `up`, `down`, `kill`, `start`, `status`, `clean`. Read this first.

Parts are started in order, each awaited before the next; whatever goes wrong on the way, those started by this
call are stopped again. One change at a time: a lock in the stack's directory. Each process leads its own session
and outlives the caller; `state.json` says which they are.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local.model import MODEL_DIR, ROOT, prepare_model
from deploy.local.parts import PART_NAMES, Part, StackSettings, host_memory_bytes, stack_parts
from deploy.local.ports import DEFAULT_PORT, check_ports_free
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
    read_settings,
    read_state,
    write_part,
    write_settings,
)

DEFAULT_DIRECTORY = ROOT / ".stack"
NEEDED_DISK_BYTES = 2 << 30
_POLL_S = 0.2


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

    `env` is laid over every part's environment; `engine_args` are appended to vLLM's command line.
    """

    def __init__(
        self,
        directory: Path = DEFAULT_DIRECTORY,
        *,
        port: int | None = None,
        dtype: str | None = None,
        model_dir: Path | None = None,
        dev: bool | None = None,
        engine_args: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.paths = StackPaths(directory.resolve())
        self._asked: dict[str, Any] = {
            "port": port,
            "dtype": dtype,
            "model_dir": None if model_dir is None else str(model_dir),
            "dev": dev,
            "engine_args": None if engine_args is None else list(engine_args),
            "env": None if env is None else dict(env),
        }
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """The gateway's URL."""
        return self._parts()["gateway"].url

    @property
    def engine_url(self) -> str:
        """The URL of vLLM itself, past the gateway."""
        return self._parts()["engine"].url

    def is_up(self) -> bool:
        """Return whether every part runs (ready or not)."""
        state = read_state(self.paths)
        return all(name in state and is_alive(state[name].name) for name in PART_NAMES)

    def up(self, names: Sequence[str] = PART_NAMES) -> None:
        """Start what does not run and return when all of `names` are ready. Raises StepFailed.

        On failure or Ctrl-C the parts that this call started are stopped.
        """
        with self._locked():
            running = self._running()
            missing = [name for name in names if name not in running]
            if running:
                self._refuse_other_settings()
            if not missing:
                say(f"already up: {self.url}")
                return
            say(f"starting {', '.join(missing)} (logs: {self.paths.log('*')})")
            settings = self._settings(remembered=bool(running))
            prepared = prepare_model(settings.model_dir) if settings.model_dir == MODEL_DIR else settings.model_dir
            assert prepared == settings.model_dir
            self._prepare_directories(fresh=not running)
            write_settings(self.paths, self._setting_values(remembered=bool(running)))
            parts = {part.name: part for part in stack_parts(settings)}
            check_ports_free([(name, parts[name].port) for name in missing])
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
            check_ports_free([(name, part.port)])
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

    def down(self) -> None:
        """Stop every part in reverse order and remove all but logs and data. Safe to call at any time."""
        with self._locked():
            state = read_state(self.paths)
            if not any(session_members(record.name) for record in state.values()):
                say("nothing runs")
            for name in reversed(PART_NAMES):
                if name in state:
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
        return [self._status(parts[name], state.get(name)) for name in PART_NAMES]

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
            for part in parts:
                started.append(part.name)
                self._start(part)
            self._await_gateway()
        except BaseException:
            self._undo(started)
            raise

    def _await_gateway(self) -> None:
        """Wait until a gateway that ran before has seen what was started: it looks once a second."""
        gateway = self._parts()["gateway"]
        if not self.is_up() or gateway.is_ready():
            return
        log = self.paths.log(gateway.name)
        with Step("gateway sees it") as step:
            while not gateway.is_ready():
                if step.elapsed_s > gateway.ready_within_s:
                    raise StepFailed(f"the gateway finds no ready engine; {log_excerpt(log)}")
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

    def _start(self, part: Part) -> None:
        log = self.paths.log(part.name)
        if (before := read_state(self.paths).get(part.name)) is not None:
            kill_session(before.name)  # what a leader that died left behind
            self._reap(part.name)
        with Step(f"{part.name} on {part.url}") as step:
            child = start_process(part.command, env=part.env, cwd=ROOT, log=log)
            self._children[part.name] = child
            name = name_of(child.pid)
            write_part(self.paths, part.name, RunningPart(name.pid, part.url, name.started))
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
            grace_s = self._parts()[name].grace_s
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
            "model_dir": str(MODEL_DIR),
            "dev": False,
            "engine_args": [],
            "env": {},
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
            dev=bool(values["dev"]),
            engine_args=tuple(values["engine_args"]),
            env=values["env"],
        )

    def _parts(self) -> dict[str, Part]:
        return {part.name: part for part in stack_parts(self._settings())}

    def _known(self, name: str) -> Part:
        if name not in PART_NAMES:
            raise StepFailed(f"no part is called {name!r}; PART= one of {', '.join(PART_NAMES)}")
        return self._parts()[name]

    def _prepare_directories(self, *, fresh: bool) -> None:
        paths = self.paths
        free = shutil.disk_usage(paths.root).free
        if free < NEEDED_DISK_BYTES:
            raise StepFailed(f"{free / 2**30:.1f} GiB free under {paths.root}; about 2 GiB are needed for KV and logs")
        if fresh:
            shutil.rmtree(paths.run, ignore_errors=True)  # of a stack that was killed
        for directory in (paths.data / "redis", paths.data / "sidecar", paths.root / "logs"):
            directory.mkdir(parents=True, exist_ok=True)
        paths.run.mkdir(mode=0o700, exist_ok=True)
        for directory in (paths.shared_blocks, paths.scratch):
            directory.mkdir(mode=0o700, exist_ok=True)
        make_secrets(paths)
        if not host_memory_bytes(paths.shared_memory_free):
            say("  /dev/shm is too small to share KV through it (512 MiB would do): it travels in gRPC frames")
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
