"""One memory region that sidecar and engine both see: the sidecar owns it, the engine is lent it by descriptor.

The sidecar makes a memfd and hands its descriptor over a Unix socket beside its gRPC socket (SCM_RIGHTS); no file, no
volume, and nothing that stays after both have died. The connection stays open for as long as the engine may touch the
region: its end is how the sidecar learns that nobody writes to what it lent (memory.py knows the lent slots).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import re
import secrets
import socket
import stat
import threading
import weakref
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

SUFFIX = ".arena"
"""The region's socket is the gRPC socket's path and this."""
_BORROWERS_MAX = 256
"""Connections at once: ranks of the engines of a pod, and those of engines that end."""
_ANSWER_S = 2.0
"""How long the engine waits for the descriptor."""
_MADV_POPULATE_WRITE = 23
"""Linux 5.14, include/uapi/asm-generic/mman-common.h; older kernels answer EINVAL, which is no fault."""
_STEP_BYTES = 64 << 20
_WORD_BYTES = 64
_NAME_BYTES = 32
_POLL_S = 0.05
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_CONNECTIONS: weakref.WeakSet[socket.socket] = weakref.WeakSet()
"""This process's as a borrower; a child that it forks closes its copies, or it would stand for this one that ended."""


def populate(address: int, size_bytes: int, *, stopping: threading.Event) -> int:
    """Touch memory a step at a time until `stopping`, contents as they are; return the bytes touched.

    Meant for a thread of its own: seconds for some GiB, without the interpreter's lock. Raises nothing.
    """
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    touched_bytes = 0
    for step in range(start, end, _STEP_BYTES):
        size = min(_STEP_BYTES, end - step)
        if stopping.is_set() or _LIBC.madvise(step, size, _MADV_POPULATE_WRITE):
            break
        touched_bytes += size
    return touched_bytes


class Region:
    """Anonymous shared memory of a fixed size, mapped into this process until `close()`.

    Its size is sealed: an engine that cuts it short would kill whoever reads behind the end.
    """

    def __init__(self, size_bytes: int) -> None:
        """Make it; nothing is resident yet. Raises OSError when there is no such memory."""
        self.size_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.descriptor = os.memfd_create("context-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, self.size_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._address, self.view = _mapped(self.descriptor, self.size_bytes)
        self._stopping = threading.Event()
        self._populating: threading.Thread | None = None
        self.is_populated = False
        """Whether memory is behind all of it, as far as the kernel gives it at once."""

    def populate(self) -> None:
        """Begin to put memory behind the whole region, in a thread that `close` ends."""
        self._populating = threading.Thread(target=self._populate, name="kv-arena", daemon=True)
        self._populating.start()

    def _populate(self) -> None:
        _give_way()
        populate(self._address, self.size_bytes, stopping=self._stopping)
        self.is_populated = True

    def close(self) -> None:
        """Let go of the memory; it lives on while an engine maps it. Harmless when repeated."""
        self._stopping.set()
        if self._populating is not None:
            self._populating.join()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.view = memoryview(b"")


class ArenaDoor:
    """Hands the region's descriptor to whoever may open the socket, and notices when they have gone."""

    def __init__(
        self, path: Path, region: Region, *, on_come: Callable[[str], None], on_gone: Callable[[str], None]
    ) -> None:
        """Have `on_come` and `on_gone` called in the event loop, with the name of a borrower.

        The one before it has the descriptor, the other when its process has ended or let go.
        """
        self._path = path
        self._region = region
        self._on_come = on_come
        self._on_gone = on_gone
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Listen. Raises OSError when the address cannot be had."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and stat.S_ISSOCK(self._path.stat().st_mode):
            self._path.unlink()  # a killed process's: the lock on the data directory says that it is not alive
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.setblocking(False)
        listener.bind(str(self._path))
        # As for the gRPC socket: the engine may be another user of the sidecar's group.
        self._path.chmod(0o660)
        listener.listen(_BORROWERS_MAX)
        self._listener = listener
        self._own(self._accept(listener))

    async def close(self) -> None:
        """End all connections."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)

    def _own(self, steps: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(steps)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError:
                log.warning("arena socket cannot accept", exc_info=True)
                await asyncio.sleep(1)
                continue
            if len(self._tasks) > _BORROWERS_MAX:
                connection.close()
                continue
            self._own(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        borrower = secrets.token_hex(_NAME_BYTES // 2)
        self._on_come(borrower)
        try:
            connection.setblocking(False)
            socket.send_fds(connection, [borrower.encode()], [self._region.descriptor])
            # Memory is charged to the container of whoever touches it first: ours.
            while not self._region.is_populated:  # noqa: ASYNC110  # it is set by a thread, once, seconds after the start
                await asyncio.sleep(_POLL_S)
            connection.send(b"\n")
            # Nothing is ever sent our way: the next thing is the end.
            while await asyncio.get_running_loop().sock_recv(connection, _WORD_BYTES):
                pass
        except OSError:
            log.warning("arena descriptor not handed over", exc_info=True)
        finally:
            connection.close()
            self._on_gone(borrower)


class MappedArena:
    """The region as an engine's process sees it. Open for as long as somebody holds this object.

    Whoever is going to write to a lent slot holds it: the connection's end tells the sidecar that nobody writes.
    """

    def __init__(
        self, connection: socket.socket, descriptor: int, borrower: str, *, on_gone: Callable[[], None]
    ) -> None:
        """Map `descriptor` and take it over. `on_gone`: called once in a thread when the sidecar has gone.

        Raises OSError, also for -1: none was handed over.
        """
        self.size_bytes = os.fstat(descriptor).st_size
        try:
            address, self._view = _mapped(descriptor, self.size_bytes)
        finally:
            os.close(descriptor)
        _CONNECTIONS.add(connection)
        self.borrower = borrower
        """What the sidecar calls this process."""
        self._stopping = threading.Event()
        threading.Thread(
            target=_attend,
            args=(connection, address, self._view, self._stopping, on_gone),
            name="context-cache-arena",
            daemon=True,
        ).start()
        self._finalizer = weakref.finalize(self, _let_go, connection, self._stopping)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Return a stretch of the region. Raises ValueError for one that is not inside."""
        if not 0 <= offset <= offset + size_bytes <= self.size_bytes:
            raise ValueError("offset outside the arena")
        return self._view[offset : offset + size_bytes]


def open_arena(sidecar: str, on_gone: Callable[[], None]) -> MappedArena:
    """Borrow the arena of the sidecar at this gRPC address. Raises OSError, also for an address on another machine."""
    scheme, _, path = sidecar.partition(":")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(_ANSWER_S)
        connection.connect(re.sub("^//", "", path) + SUFFIX if scheme == "unix" else "")
        word, descriptors, _, _ = socket.recv_fds(connection, _NAME_BYTES, 1)
        connection.settimeout(None)
        return MappedArena(connection, next(iter(descriptors), -1), word.decode(), on_gone=on_gone)
    except BaseException:
        connection.close()
        raise


def _attend(
    connection: socket.socket,
    address: int,
    view: memoryview,
    stopping: threading.Event,
    on_gone: Callable[[], None],
) -> None:
    """Fill this process's page table once there is memory, then wait for the end. `view` keeps the address valid."""
    try:
        if connection.recv(1):
            _give_way()
            populate(address, len(view), stopping=stopping)
        while connection.recv(_WORD_BYTES):
            pass
    except OSError:
        pass  # an end like any other
    connection.close()
    if not stopping.is_set():
        on_gone()


def _give_way() -> None:
    """Let everybody else have the cores before this thread: the first restores are on their way."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _close_connections() -> None:
    for connection in tuple(_CONNECTIONS):
        connection.close()


os.register_at_fork(after_in_child=_close_connections)


def _let_go(connection: socket.socket, stopping: threading.Event) -> None:
    stopping.set()
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the other end was faster


def _mapped(descriptor: int, size_bytes: int) -> tuple[int, memoryview]:
    """Map shared memory; return where, and a view that it goes with, and with the last slice of it. Raises OSError.

    Not by Python's `mmap`, which keeps a descriptor of its own (until 3.13): a process that the engine forks would have
    it, and the memory would outlive both.
    """
    address = _LIBC.mmap(None, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "the arena cannot be mapped")
    # Huge pages where there are any; such a process must not look as if it might write; no KV in core dumps.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
        _LIBC.madvise(address, size_bytes, advice)
    memory = (ctypes.c_ubyte * size_bytes).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, size_bytes).atexit = False
    return address, np.ctypeslib.as_array(memory).data
