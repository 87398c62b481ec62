"""One container of a rendered pod, as a process."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen
from typing import Any

from deploy.local.processes import ProcessName, kill_session, name_of, session_members, start_process, stop_session
from tests.kit.rendered import images, probes
from tests.kit.rendered.substitutions import Substitutions

_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_LOG_BYTES = 6000


class Container:
    """`spec` as rendered; `env` is resolved already, `more_env` is as it will be; `change`: what a process needs."""

    def __init__(
        self,
        spec: Mapping[str, Any],
        *,
        env: Mapping[str, str],
        more_env: Mapping[str, str],
        change: Substitutions,
        address: str,
        folder: Path,
    ) -> None:
        self.spec = spec
        self.name: str = spec["name"]
        self.address = address
        self.ports = {port["name"]: port["containerPort"] for port in spec.get("ports", [])}
        self.log = folder / f"{self.name}.log"
        known: dict[str, str] = {}
        for variable, value in env.items():
            known[variable] = expanded(value, known)
        self._change = change
        # Our interpreter is the image's own file, also where the checkout lies below a mount path such as /tmp.
        words = images.command_of(spec)
        self._command = [word if word.startswith(sys.prefix) else change(expanded(word, known)) for word in words]
        self._env = images.environment_of(spec, folder / self.name, address)
        self._env |= {variable: change(value) for variable, value in known.items()} | dict(more_env)
        if "/tmp" in change.mounts:
            self._env["TMPDIR"] = str(change.mounts["/tmp"])
        self._process: Popen[bytes] | None = None
        self._session: ProcessName | None = None

    @property
    def mounts(self) -> Mapping[str, Path]:
        """Mount paths and the folders that stand for them."""
        return self._change.mounts

    @property
    def pids(self) -> list[int]:
        """Every process of the container."""
        return [] if self._session is None else session_members(self._session)

    def start(self) -> None:
        """Start it; what ran before must have ended."""
        assert not self.pids, f"{self.name} runs"
        self._change.bootstrap(self._command)
        self._process = start_process(self._command, env=self._env, cwd=Path("/"), log=self.log)
        self._session = name_of(self._process.pid)

    def exit_status(self) -> int | None:
        """Return how it ended; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def wait(self, within_s: float) -> int:
        """Return how it ended. Raises subprocess.TimeoutExpired."""
        assert self._process is not None
        return self._process.wait(within_s)

    def kill(self) -> None:
        """End it as the kernel does that lacks memory: with all it forked, at once."""
        if self._session is not None:
            kill_session(self._session, child=self._process)

    def terminate(self, grace_s: float) -> bool:
        """Send SIGTERM; after `grace_s` kill it. Return whether it ended by itself."""
        return self._session is None or stop_session(self._session, grace_s=grace_s, child=self._process)

    def passes(self, kind: str) -> bool:
        """Return whether a probe succeeds now, once; one that is not there does."""
        probe = self.spec.get(f"{kind}Probe")
        if probe is None:
            return True
        if "exec" in probe:
            probe = probe | {"exec": {"command": [self._change(word) for word in probe["exec"]["command"]]}}
        return probes.passes(probe, address=self.address, ports=self.ports, env=self._env)

    def stray_files(self) -> set[Path]:
        """Return the files outside of its writable mounts that a process of it has open for writing."""
        writable = [
            self.mounts[mount["mountPath"]] for mount in self.spec["volumeMounts"] if not mount.get("readOnly", False)
        ]
        return {
            path
            for pid in self.pids
            for path in _open_for_writing(pid)
            if path != self.log and not any(folder in path.parents for folder in writable)
        }

    def last_words(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-_LOG_BYTES:]


def expanded(text: str, env: Mapping[str, str]) -> str:
    """Return the text with $(NAME) replaced as Kubernetes does: unknown names stay, $$ is one $."""
    return _REFERENCE.sub(lambda found: "$" if found[1] is None else env.get(found[1], found[0]), text)


def _open_for_writing(pid: int) -> set[Path]:
    """Return regular files, also those that have no name any more."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            path, flags = link.readlink(), (link.parents[1] / "fdinfo" / link.name).read_text()
            is_file = stat.S_ISREG(link.stat().st_mode)
        except FileNotFoundError:
            continue
        mode = int(next(line.split()[1] for line in flags.splitlines() if line.startswith("flags:")), 8)
        if is_file and mode & os.O_ACCMODE and not str(path).startswith("/memfd:"):
            found.add(path)
    return found
