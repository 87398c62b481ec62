"""LMCache's second tier over a kv-sidecar: its objects as KV of the sidecar's, with quota, TTL, checksums and metrics.

Loaded by LMCache's server (`--l2-adapter`), so it imports only LMCache (extra `[lmcache]`) and the
engine's client of a sidecar. `objects.py` maps objects to KV. Mirrors lmcache 0.5.6 v1/distributed/l2_adapters/base.py
L2AdapterInterface and plugin_l2_adapter.py; both changed twice in a year, so the versions are pinned.

Rules: no fault here is more than a miss or a save that is dropped; every call has a deadline; at most `workers` at
once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier
from typing_extensions import override

from contextcache.errors import ContextCacheError
from integrations.lmcache.objects import SidecarObjects

log = logging.getLogger(__name__)

_WORKERS = 4
"""Objects that travel at once."""
_PENDING_MAX = 4_096
"""Tasks that wait for a worker; one more fails at once."""
_SIZES_MAX = 1 << 20
"""Objects whose bytes are remembered, for LMCache's own accounts."""

Result = TypeVar("Result")


class _Tasks(Generic[Result]):
    """Tasks of one kind: a result waits until LMCache asks for it, and an event announces it."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._event = create_event_notifier()
        self._lock = threading.Lock()
        self._done: dict[int, Result] = {}
        self._num_begun = 0
        self._num_pending = 0

    @property
    def fd(self) -> int:
        return int(self._event.fileno())

    def begin(self, work: Callable[[], Result], failed: Result) -> int:
        """Start `work` and return the task's number; `failed`: its result if it raises."""
        with self._lock:
            self._num_begun += 1
            number, is_full = self._num_begun, self._num_pending >= _PENDING_MAX
            self._num_pending += 1
        if is_full:
            self._end(number, failed)
        else:
            self._pool.submit(self._run, number, work, failed)
        return number

    def take(self, number: int) -> Result | None:
        """Return the result of a task, once; None: not yet."""
        with self._lock:
            return self._done.pop(number, None)

    def take_all(self) -> dict[int, Result]:
        """Return all results, once."""
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        self._event.close()

    def _run(self, number: int, work: Callable[[], Result], failed: Result) -> None:
        result = failed
        try:
            result = work()
        except Exception:  # LMCache waits for every task it began
            log.exception("second tier task failed")
        finally:
            self._end(number, result)

    def _end(self, number: int, result: Result) -> None:
        with self._lock:
            self._num_pending -= 1
            self._done[number] = result
        self._event.notify()


class SidecarL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache is not followed by mypy
    """LMCache's second tier. It locks nothing: an object deleted between lookup and load is a miss."""

    def __init__(self, params: dict[str, Any], l1_memory_desc: object = None) -> None:  # noqa: ARG002  # LMCache's own
        """`params`: those of SidecarObjects, and `workers`. Raises TypeError for others. Connects at the first call."""
        super().__init__(max_capacity_bytes=0)  # the sidecar evicts
        own = {"workers": _WORKERS, **params}
        self._pool = ThreadPoolExecutor(own.pop("workers"), thread_name_prefix="sidecar-l2")
        self._objects = SidecarObjects(**own)
        self._sizes_bytes: dict[ObjectKey, int] = {}
        self._stores: _Tasks[L2StoreResult] = _Tasks(self._pool)
        self._lookups: _Tasks[Bitmap] = _Tasks(self._pool)
        self._loads: _Tasks[Bitmap] = _Tasks(self._pool)

    @override
    def get_store_event_fd(self) -> int:
        return self._stores.fd

    @override
    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.fd

    @override
    def get_load_event_fd(self) -> int:
        return self._loads.fd

    @override
    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        def store() -> L2StoreResult:
            saved = []
            for key, room in zip(keys, objects, strict=True):
                try:
                    saved.append((key, self._objects.put(key, _bytes_of(room))))
                except ContextCacheError as exc:
                    log.warning("object not saved", extra={"reason": exc.code})
            new = [(key, size) for key, size in saved if key not in self._sizes_bytes]
            if new and len(self._sizes_bytes) < _SIZES_MAX:
                self._sizes_bytes.update(new)
                self._notify_keys_stored([key for key, _ in new], [size for _, size in new])
            return L2StoreResult(len(saved) == len(keys), sum(size for _, size in saved))

        return self._stores.begin(store, L2StoreResult(False, 0))

    @override
    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.take_all()

    @override
    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        return self._lookups.begin(
            lambda: _found(keys, lambda number: self._objects.has(keys[number])), Bitmap(len(keys))
        )

    @override
    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    @override
    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is locked."""

    @override
    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        def load(number: int) -> bool:
            self._objects.get(keys[number], _bytes_of(objects[number]))
            self._notify_keys_accessed([keys[number]])
            return True

        return self._loads.begin(lambda: _found(keys, load), Bitmap(len(keys)))

    @override
    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    @override
    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete all, or raise the first ContextCacheError: LMCache then tells its caller."""
        for key in keys:
            self._objects.delete(key)
            # LMCache has not counted an object of an earlier process.
            self._notify_keys_deleted([key], [self._sizes_bytes.pop(key, 0)])

    @override
    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._objects.close()
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()

    def report_status(self) -> dict[str, Any]:
        """Return the entry of LMCache's `/status`."""
        return {"is_healthy": True, "type": "SidecarL2Adapter"}


def _found(keys: Sequence[ObjectKey], is_there: Callable[[int], bool]) -> Bitmap:
    """Return the keys that are stored; a failed question counts as absent."""
    bits = Bitmap(len(keys))
    for number in range(len(keys)):
        try:
            if is_there(number):
                bits.set(number)
        except ContextCacheError as exc:
            log.warning("object not loaded", extra={"reason": exc.code})
    return bits


def _bytes_of(room: MemoryObj) -> memoryview:
    return memoryview(room.byte_array).cast("B")
