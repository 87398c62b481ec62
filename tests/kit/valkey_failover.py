"""A primary, a replica and a Sentinel that promotes it: the same binary thrice, on loopback."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.kit.ports import free_port
from tests.kit.until import wait_until
from tests.kit.valkey import ValkeyServer, valkey_binary

SERVICE = "main"
DOWN_AFTER_MS = 5000
"""A server that stands still with its machine is not down, and a Sentinel is late there itself."""


class FailoverPair:
    """Started by `start`, ended by `stop`. `primary` is the one that was the primary first."""

    def __init__(self, directory: Path, *, appendfsync: str = "") -> None:
        for name in ("primary", "replica", "sentinel"):
            (directory / name).mkdir(parents=True, exist_ok=True)
        self.primary = ValkeyServer(directory / "primary", appendfsync=appendfsync)
        self.replica = ValkeyServer(directory / "replica", appendfsync=appendfsync, replica_of=self.primary)
        self.sentinel_port = free_port()
        self._sentinel_directory = directory / "sentinel"
        self._sentinel: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL through the Sentinel, as MANAGER_REDIS_URL takes it."""
        return f"redis+sentinel://127.0.0.1:{self.sentinel_port}/{SERVICE}"

    def start(self, *, sentinel: bool = True) -> None:
        """Start both servers, the replica in step, and the Sentinel when asked for."""
        self.primary.start()
        self.replica.start()
        if not sentinel:
            return
        configuration = self._sentinel_directory / "sentinel.conf"
        configuration.write_text(
            f"port {self.sentinel_port}\nbind 127.0.0.1\ndir {self._sentinel_directory}\n"
            f"logfile {self._sentinel_directory}/sentinel.log\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary.port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_AFTER_MS}\n"
            f"sentinel failover-timeout {SERVICE} 10000\n"
        )
        self._sentinel = subprocess.Popen(
            [str(valkey_binary()), str(configuration), "--sentinel"], stdout=subprocess.DEVNULL
        )
        # It learns of replicas every ten seconds; without one it cannot fail over.
        self._until_sentinel_says(b"num-slaves\r\n$1\r\n1", "SENTINEL", "MASTER", SERVICE)

    def promote(self) -> None:
        """Make the replica the primary by hand, and the old primary its replica when it lives."""
        assert self.replica.command("REPLICAOF", "NO", "ONE") == b"+OK\r\n"

    def until_promoted(self, within_s: float = 90.0) -> None:
        """Wait until the replica is the primary, for the Sentinel too."""
        wait_until(
            lambda: b"role:master" in self.replica.command("INFO", "replication"),
            what="the replica is the primary",
            deadline_s=within_s,
        )
        if self._sentinel is not None:
            # Until it says so, too, an old primary that starts anew would be taken for the primary.
            port = str(self.replica.port).encode()
            self._until_sentinel_says(port, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE, within_s=within_s)

    def stop(self) -> None:
        """End what runs; harmless otherwise."""
        sentinel, self._sentinel = self._sentinel, None
        if sentinel is not None:
            sentinel.kill()
            sentinel.wait(timeout=60)
        self.replica.stop()
        self.primary.stop()

    def _until_sentinel_says(self, expected: bytes, *words: str, within_s: float = 90.0) -> None:
        asked = ValkeyServer(self._sentinel_directory)
        asked.port = self.sentinel_port
        wait_until(
            lambda: asked.command(*words),
            is_so=lambda reply: expected in reply,
            what=f"the Sentinel says {expected!r}",
            deadline_s=within_s,
            despite=(OSError,),
        )
