"""Host memory that a GPU copies to and from by itself: registered with its driver, piece by piece, in the background.

A piece is registered once there is memory behind all of it: registering would put it there, and it would count to this
process's container instead of to its owner's. Until then, and for good where the driver refuses, it is memory like any
other, and copies to it go by way of our own.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import weakref
from typing import Protocol

import numpy as np

from vllm_plugin.connector.copies.pages import Pages

log = logging.getLogger(__name__)

PIECE_BYTES = 1 << 30
"""Registered in one call: the driver holds locks meanwhile that the engine may want."""
_LOOK_AGAIN_S = 0.2
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


class Registrar(Protocol):
    """The driver, as far as it is needed here."""

    def register(self, address: int, size_bytes: int) -> None:
        """Pin memory and make it known to the device. Raises RuntimeError with the driver's reason."""
        ...

    def unregister(self, address: int) -> None:
        """Unpin the memory that begins at this address. Raises RuntimeError."""
        ...


class RegisteredMemory:
    """All memory that one rank's device can reach now."""

    def __init__(self, driver: Registrar, *, piece_bytes: int = PIECE_BYTES) -> None:
        self._driver = driver
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._pieces: frozenset[tuple[int, int]] = frozenset()
        """Addresses of the first byte and behind the last. Replaced under the lock, read without."""

    def add(self, memory: memoryview, *, owner: object) -> None:
        """Begin to register page-aligned memory; it is let go of, and kept mapped until then, when `owner` has gone.

        A thread that copies holds `owner`: nothing is unregistered under a copy. Raises RuntimeError without a thread.
        """
        gone = threading.Event()
        weakref.finalize(owner, gone.set).atexit = False
        name = "context-cache-registration"
        threading.Thread(target=self._attend, args=(memory, gone), name=name, daemon=True).start()

    def holds(self, pages: Pages) -> bool:
        """Return whether all of it is in one piece: no copy may cross from one into another."""
        start = pages.ctypes.data
        return any(first <= start and start + pages.nbytes <= end for first, end in self._pieces)

    def _attend(self, memory: memoryview, gone: threading.Event) -> None:
        address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        mine: set[tuple[int, int]] = set()
        try:
            for start in range(address, address + len(memory), self._piece_bytes):
                size_bytes = min(self._piece_bytes, address + len(memory) - start)
                while not _is_resident(start, size_bytes):
                    if gone.wait(_LOOK_AGAIN_S):
                        return
                if gone.is_set():
                    return
                self._driver.register(start, size_bytes)
                mine.add((start, start + size_bytes))
                with self._lock:
                    self._pieces |= mine
            log.info("arena registered with the GPU driver", extra={"size_bytes": len(memory)})
        except RuntimeError as exc:
            registered_bytes = sum(end - first for first, end in mine)
            fields = {"size_bytes": len(memory), "registered_bytes": registered_bytes, "reason": str(exc)}
            log.warning("arena not registered with the GPU driver, KV is staged", extra=fields)
        finally:
            gone.wait()
            with self._lock:
                self._pieces -= mine
            self._unregister(mine)

    def _unregister(self, pieces: set[tuple[int, int]]) -> None:
        try:
            for first, _ in sorted(pieces):
                self._driver.unregister(first)
        except RuntimeError:
            log.warning("arena not unregistered", exc_info=True)


def _is_resident(address: int, size_bytes: int) -> bool:
    pages = np.zeros(-(-size_bytes // mmap.PAGESIZE), dtype=np.uint8)
    return not _LIBC.mincore(address, size_bytes, pages.ctypes.data) and bool((pages & 1).all())
