"""What loads and saves share in a worker: bounded threads, bounded staging bytes, and the box of results.

The engine's thread only puts work in and takes results out; both take a lock for the length of a few set operations.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

_LOOK_AGAIN_S = 0.02
"""Who waits for staging bytes looks at its deadline this often."""


@dataclass(slots=True)
class Results:
    """What has ended since the engine last asked. Request ids are the engine's own."""

    sent: set[str] = field(default_factory=set)
    """Finished requests whose blocks may be freed."""
    received: set[str] = field(default_factory=set)
    """Requests whose load has ended, well or badly."""
    failed: set[str] = field(default_factory=set)
    """Those of `received` that must be computed."""
    ended_saves: set[str] = field(default_factory=set)
    """cache_refs that were sealed, skipped or given up."""


class ResultBox:
    """Filled by transfer threads, emptied by the engine's thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._results = Results()

    def release_blocks(self, engine_request_id: str) -> None:
        """Let the engine free a finished request's blocks."""
        with self._changed:
            self._results.sent.add(engine_request_id)
            self._changed.notify()

    def end_save(self, cache_ref: str) -> None:
        """Tell that nobody needs to wait for this save any more."""
        with self._changed:
            self._results.ended_saves.add(cache_ref)

    def end_load(self, engine_request_id: str, *, is_failed: bool = False) -> None:
        """Note the end of a load."""
        with self._changed:
            self._changed.notify()
            self._results.received.add(engine_request_id)
            if is_failed:
                self._results.failed.add(engine_request_id)

    def wait(self, timeout_s: float) -> None:
        """Wait until a load has ended, or blocks may be freed."""
        with self._changed:
            self._changed.wait_for(lambda: self._results.received or self._results.sent, timeout_s)

    def take(self) -> Results:
        """Return everything since the last call."""
        with self._changed:
            taken, self._results = self._results, Results()
        return taken


class StagingBudget:
    """Bytes copied out of the engine and not yet taken by the sidecar, bounded; who waits is served in order."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._queue: deque[object] = deque()
        self._used_bytes = 0
        self.num_returns = 0
        """How often bytes came back: while it grows, the sidecar takes what it is given."""

    @property
    def used_bytes(self) -> int:
        """Bytes in use now."""
        return self._used_bytes

    def try_take(self, size_bytes: int) -> bool:
        """Take bytes, or return False at once when they do not fit or somebody waits already. Never waits."""
        with self._changed:
            if self._queue or self._used_bytes + size_bytes > self.limit_bytes:
                return False
            self._used_bytes += size_bytes
            return True

    def take(self, size_bytes: int, *, check: Callable[[], None]) -> None:
        """Take bytes, in turn; they must fit into the limit. `check` is called now and then, and raises to stop it."""
        assert size_bytes <= self.limit_bytes, "they would never fit"
        ticket = object()
        with self._changed:
            self._queue.append(ticket)
            try:
                while self._queue[0] is not ticket or self._used_bytes + size_bytes > self.limit_bytes:
                    check()
                    self._changed.wait(_LOOK_AGAIN_S)
                self._used_bytes += size_bytes
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def give_back(self, size_bytes: int) -> None:
        """Return bytes."""
        with self._changed:
            self._used_bytes -= size_bytes
            self.num_returns += 1
            assert self._used_bytes >= 0, "bytes are given back once"
            self._changed.notify_all()


class TransferPool:
    """A few threads behind a bounded queue; started at the first piece of work."""

    def __init__(self, name: str, *, threads: int, queue_limit: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"context-cache-{name}")
        self._lock = threading.Lock()
        self._live: set[Future[None]] = set()
        self._limit = threads + queue_limit

    def try_submit(self, work: Callable[[], None]) -> Future[None] | None:
        """Queue `work`, or return None at once when the queue is full or the pool is closed. Never waits."""
        future: Future[None] = Future()
        with self._lock:
            if len(self._live) >= self._limit:
                return None
            try:
                self._executor.submit(_carry_out, future, work)
            except RuntimeError:
                # Closed, or no thread could be started. Then the work was queued all the same, for the threads there
                # are: it must not run when the caller has been told that it will not, and has freed what it uses.
                if future.cancel():
                    return None
            self._live.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._live.discard(future)
        if not future.cancelled() and (error := future.exception()) is not None:
            log.error("transfer thread failed", exc_info=error)

    def drain(self, timeout_s: float) -> None:
        """Wait until everything there is now has ended, for `timeout_s` at most."""
        with self._lock:
            live = list(self._live)
        wait(live, timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Drop what waits, and return whether everything running has ended within `timeout_s`."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            live = list(self._live)
        running = [future for future in live if not future.cancel()]
        return not wait(running, timeout_s).not_done


def _carry_out(future: Future[None], work: Callable[[], None]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        work()
    except BaseException as exc:  # noqa: BLE001  # as an executor does: whoever waits for it gets it
        future.set_exception(exc)
    else:
        future.set_result(None)
