"""One memory region that sidecar and engine both see: the sidecar owns it, the engine is lent it by descriptor.

The sidecar makes a memfd and hands its descriptor over a Unix socket beside its gRPC socket (SCM_RIGHTS); no file, no
volume, and nothing that stays after both have died. The connection stays open for as long as the engine may touch the
region: its end tells the sidecar that no engine writes to the lent slots (memory.py).

A second memfd, read-only for the engine, has one counter for each granule of the region. The sidecar raises the counter
of a slot's first granule when it frees the slot. An engine that reads the same value after a copy as before it has
copied the slot that it was told of.
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
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

SUFFIX = ".arena"
"""The region's socket is the gRPC socket's path and this."""
_BORROWERS_MAX = 256
"""Maximum number of connections: ranks of a pod's engines, and of engines that end."""
_ANSWER_S = 2.0
"""How long the engine waits for the descriptor."""
_MADV_POPULATE_WRITE = 23
"""Linux 5.14, include/uapi/asm-generic/mman-common.h; older kernels answer EINVAL, which is no fault."""
_F_SEAL_FUTURE_WRITE = 0x10
"""Linux 5.1, include/uapi/linux/fcntl.h: later mappings are read-only, the sidecar's own stays writable."""
_HUGE_BYTES = 2 << 20
"""Size of a huge page on x86-64."""
_HUGE_LIMIT = Path("/sys/fs/cgroup/hugetlb.2MB.max")
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Numbers of the system call; the C library does not have it."""
_MPOL_PREFERRED = 1
"""Memory of that node while it has any, else of another one."""
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
"""PCI vendor, and the first digits of the class of display and 3D controllers."""
_FINE_BYTES, _FINE_UP_TO_BYTES, _COARSE_BYTES = 64, 64 << 20, 4096
"""Granules of the counters. Two slots that begin in one granule only cause a copy to be repeated."""
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
"""Connections of this process as a borrower. A forked child closes its copies, or it would stand for its parent."""


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

    Its size is sealed: an engine that shortens it would kill every process that reads behind the end.
    """

    def __init__(self, size_bytes: int) -> None:
        """Make it; nothing is resident yet. Raises OSError when there is no such memory."""
        self.descriptor, self._address, self.view = _huge_memory(size_bytes) or _memory(size_bytes, mmap.PAGESIZE)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        self.size_bytes = len(self.view)
        _place_near_gpu(self._address, self.size_bytes)
        table_bytes = 8 * (self.size_bytes // _granule_bytes(self.size_bytes))
        self.table, _, table = _memory(table_bytes, mmap.PAGESIZE)
        with contextlib.suppress(OSError):
            fcntl.fcntl(self.table, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        self._generations = np.frombuffer(table, dtype=np.uint64)
        self._stopping = threading.Event()
        self._populating: threading.Thread | None = None
        self.is_populated = False
        """Whether memory is behind all of it, as far as the kernel gives it at once."""

    def generation(self, offset: int) -> int:
        """Return the counter of the slot that begins there."""
        return int(self._generations[offset // _granule_bytes(self.size_bytes)])

    def retire(self, offset: int) -> None:
        """Raise the counter of the slot that begins there, before its room becomes free."""
        self._generations[offset // _granule_bytes(self.size_bytes)] += np.uint64(1)

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
            os.close(self.table)
            self.descriptor = self.table = -1
        self.view = memoryview(b"")


class ArenaDoor:
    """Hands the region's descriptors to processes that may open the socket, and notices their end."""

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
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None] | None] = set()
        """One for each connection."""

    async def open(self) -> None:
        """Listen. Raises OSError when the address cannot be had."""
        remove_stale_socket(self._path)
        server = await asyncio.start_unix_server(self._serve, self._path, backlog=_BORROWERS_MAX, start_serving=False)
        # As for the gRPC socket: the engine may be another user of the sidecar's group.
        self._path.chmod(0o660)
        await server.start_serving()
        self._server = server

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
        tasks = [task for task in self._tasks if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= _BORROWERS_MAX:
            writer.close()
            return
        borrower, task = secrets.token_hex(_NAME_BYTES // 2), asyncio.current_task()
        self._tasks.add(task)
        self._on_come(borrower)
        try:
            # A stream sends no descriptors: they go over a second handle of its socket.
            with socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno())) as connection:
                socket.send_fds(connection, [borrower.encode()], [self._region.descriptor, self._region.table])
            # The kernel charges memory to the container that touches it first: ours.
            while not self._region.is_populated:  # noqa: ASYNC110  # it is set by a thread, once, seconds after the start
                await asyncio.sleep(_POLL_S)
            writer.write(b"\n")
            # Nothing is ever sent our way: the next thing is the end.
            while await reader.read(_WORD_BYTES):
                pass
        except OSError:
            log.warning("arena descriptor not handed over", exc_info=True)
        finally:
            self._tasks.discard(task)
            writer.close()
            self._on_gone(borrower)


def remove_stale_socket(path: Path) -> None:
    """Remove the socket of a killed process. The lock on the data directory says that it is not alive."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
        path.unlink()


class MappedArena:
    """The region in an engine's process, open while the process holds this object.

    Each writer to a lent slot holds it: the connection's end tells the sidecar that no thread writes.
    """

    def __init__(
        self, connection: socket.socket, descriptors: Sequence[int], borrower: str, *, on_gone: Callable[[], None]
    ) -> None:
        """Map the region and its counters, and take their descriptors over.

        `on_gone`: called once in a thread when the sidecar has gone. Raises OSError, also when no descriptors came.
        """
        try:
            region, table = descriptors
            self.size_bytes, table_bytes = os.fstat(region).st_size, os.fstat(table).st_size
            address, self._view = _mapped(region, self.size_bytes)
            _, counters = _mapped(table, table_bytes, mmap.PROT_READ)
        except ValueError as exc:
            raise OSError("the sidecar handed over no arena") from exc
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self.generations: npt.NDArray[np.uint64] = np.frombuffer(counters, dtype=np.uint64)
        """Counters by granule; read-only."""
        self.granule_bytes = _granule_bytes(self.size_bytes)
        _CONNECTIONS.add(connection)
        self.borrower = borrower
        """Name that the sidecar has for this process."""
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

    def generation(self, offset: int) -> int:
        """Return the counter of the slot that begins there: it changes when the slot is freed."""
        return int(self.generations[offset // self.granule_bytes])


def open_arena(sidecar: str, on_gone: Callable[[], None]) -> MappedArena:
    """Borrow the arena of the sidecar at this gRPC address. Raises OSError, also for an address on another machine."""
    scheme, _, path = sidecar.partition(":")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(_ANSWER_S)
        connection.connect(re.sub("^//", "", path) + SUFFIX if scheme == "unix" else "")
        word, descriptors, _, _ = socket.recv_fds(connection, _NAME_BYTES, 2)
        connection.settimeout(None)
        return MappedArena(connection, descriptors, word.decode(), on_gone=on_gone)
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
    """Give this thread the lowest priority: the first restores are on their way."""
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


def _granule_bytes(region_bytes: int) -> int:
    return _FINE_BYTES if region_bytes <= _FINE_UP_TO_BYTES else _COARSE_BYTES


def _memory(size_bytes: int, page_bytes: int, *, flags: int = 0) -> tuple[int, int, memoryview]:
    """Make anonymous shared memory of a sealed size; return its descriptor, address and view. Raises OSError."""
    size_bytes = -(-size_bytes // page_bytes) * page_bytes
    descriptor = os.memfd_create("context-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    try:
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return descriptor, *_mapped(descriptor, size_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def _huge_memory(size_bytes: int) -> tuple[int, int, memoryview] | None:
    """Return memory of reserved huge pages; None where the node or the container has too few of them.

    The mapping reserves the pages. A container's limit acts at the first touch, by a signal: it is read before.
    """
    try:
        limit = _HUGE_LIMIT.read_text().strip()
    except OSError:
        limit = "max"
    if limit != "max" and int(limit) < size_bytes + _HUGE_BYTES:
        return None
    try:
        return _memory(size_bytes, _HUGE_BYTES, flags=os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except OSError:
        return None


def gpu_node(devices: Path) -> int | None:
    """Return the NUMA node of all NVIDIA devices; None: there are none, on several nodes, or it is unknown."""
    nodes = set()
    with contextlib.suppress(OSError, ValueError):
        for device in devices.iterdir():
            if (device / "vendor").read_text().strip() == _NVIDIA and (device / "class").read_text().startswith(
                _DISPLAY
            ):
                nodes.add(int((device / "numa_node").read_text()))
        if len(nodes) == 1 and min(nodes) >= 0:
            return nodes.pop()
    return None


def _place_near_gpu(address: int, size_bytes: int) -> None:
    """Prefer memory of the GPU's NUMA node. Without effect where the node is unknown or not allowed."""
    node, number = gpu_node(_PCI_DEVICES), _MBIND.get(os.uname().machine)
    if node is not None and number is not None:
        mask, pointer = ctypes.c_ulong(1 << node), ctypes.c_void_p(address)
        _LIBC.syscall(number, pointer, ctypes.c_ulong(size_bytes), _MPOL_PREFERRED, ctypes.byref(mask), 64, 0)


def _mapped(
    descriptor: int, size_bytes: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE
) -> tuple[int, memoryview]:
    """Map shared memory; return where, and a view that it goes with, and with the last slice of it. Raises OSError.

    Not by Python's `mmap`, which keeps a descriptor of its own (until 3.13): a process that the engine forks would have
    it, and the memory would outlive both.
    """
    address = _LIBC.mmap(None, size_bytes, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "the arena cannot be mapped")
    # Transparent huge pages have no effect where `shmem_enabled` is `never`. A forked process must not count as a
    # writer. A core dump must not contain KV.
    for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
        _LIBC.madvise(address, size_bytes, advice)
    memory = (ctypes.c_ubyte * size_bytes).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, size_bytes).atexit = False
    view = np.ctypeslib.as_array(memory).data
    return address, view if protection & mmap.PROT_WRITE else view.toreadonly()
