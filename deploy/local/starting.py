"""Parts as processes: started in order, awaited, ended with all they forked; `state.json` says which they are.

What parts there are and when the whole is up: stack.py. What a process is: processes.py. The caller holds the stack's
lock.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from itertools import groupby

from deploy.local.model import ROOT
from deploy.local.parts import Part
from deploy.local.paths import StackPaths
from deploy.local.processes import is_alive, kill_session, name_of, session_members, start_process, stop_session
from deploy.local.progress import Step, StepFailed, begin_run, last_line, log_excerpt, say
from deploy.local.state import RunningPart, read_state, write_part

POLL_S = 0.2


class PartProcesses:
    """The processes of one stack, whoever started them."""

    def __init__(self, paths: StackPaths) -> None:
        self._paths = paths
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def living(self) -> dict[str, RunningPart]:
        """Return the parts that live; a record of a process that is gone counts for nothing."""
        state = read_state(self._paths)
        return {name: record for name, record in state.items() if is_alive(record.name)}

    def start(self, parts: Sequence[Part], until: Callable[[], None]) -> None:
        """Start parts kind by kind, each kind awaited before the next, then call `until`. Raises StepFailed.

        Whatever goes wrong, Ctrl-C too: those started here are stopped again.
        """
        started: list[Part] = []
        try:
            for _, alike in groupby(parts, key=lambda part: part.kind):
                launched: list[tuple[Part, subprocess.Popen[bytes]]] = []
                for part in alike:
                    started.append(part)
                    launched.append((part, self._launch(part)))
                for part, child in launched:
                    self._await(part, child)
            until()
        except BaseException:
            self._undo(started)
            raise

    def clear(self, name: str) -> None:
        """End what a leader that died left behind: it may hold the part's port."""
        if (before := read_state(self._paths).get(name)) is not None:
            kill_session(before.name)
            # A leader whose threads are still ending counts as dead, and listens: reaped, it does not.
            self.reap(name)

    def kill(self, name: str, record: RunningPart) -> None:
        """SIGKILL a part with every process it forked; return when they are gone."""
        kill_session(record.name, child=self._children.pop(name, None))

    def stop(self, name: str, record: RunningPart, *, grace_s: float) -> None:
        """Ask a part to end, and end it when `grace_s` is over."""
        if not session_members(record.name):
            self.reap(name)
            return
        with Step(f"stopping {name}"):
            if not stop_session(record.name, grace_s=grace_s, child=self._children.pop(name, None)):
                say(f"    {name} was killed: it did not end within {grace_s:.0f} s")

    def reap(self, name: str) -> None:
        """Collect the exit status of a part that has ended, if this process started it."""
        if (child := self._children.pop(name, None)) is not None:
            child.wait()

    def _launch(self, part: Part) -> subprocess.Popen[bytes]:
        begin_run(self._paths.log(part.name))
        child = start_process(part.command, env=part.env, cwd=ROOT, log=self._paths.log(part.name))
        self._children[part.name] = child
        name = name_of(child.pid)
        write_part(self._paths, part.name, RunningPart(name.pid, part.url, name.started))
        return child

    def _await(self, part: Part, child: subprocess.Popen[bytes]) -> None:
        log = self._paths.log(part.name)
        with Step(f"{part.name} on {part.url}") as step:
            while not part.is_ready():
                if child.poll() is not None:
                    raise StepFailed(f"{part.name} ended with exit {child.returncode}; {log_excerpt(log)}")
                if step.elapsed_s > part.ready_within_s:
                    waited = f"{part.name} is not ready after {part.ready_within_s:.0f} s"
                    raise StepFailed(f"{waited}; {log_excerpt(log)}")
                step.beat(lambda: last_line(log))
                time.sleep(POLL_S)

    def _undo(self, started: Sequence[Part]) -> None:
        say("stopping the started parts (Ctrl-C kills them)")
        state = read_state(self._paths)
        recorded = [(part, state[part.name]) for part in reversed(started) if part.name in state]
        try:
            for part, record in recorded:
                self.stop(part.name, record, grace_s=part.grace_s)
        except KeyboardInterrupt:
            for part, record in recorded:
                self.kill(part.name, record)
