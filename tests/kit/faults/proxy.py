"""A proxy for one link, in a thread of the test: cut it, let it fall silent, slow it down, heal it.

TCP and Unix sockets. Bytes pass as they are, so HTTP, gRPC and Redis alike. Nothing here knows what a link is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

_CHUNK_BYTES = 1 << 16
_HELD_CHUNKS = 1024
"""A direction that is held or delayed keeps so many chunks, then stops reading, as a full window would."""
_CONTROL_DEADLINE_S = 30
_UNIX = "unix://"
_EVENT_END = b"\n\n"
"""Heads of HTTP and JSON have none."""


class Proxy:
    """One listener, one target. All methods may be called from any thread; each takes effect before it returns."""

    def __init__(self, target: str, *, listen: str = "") -> None:
        """`target` and `listen` are `host:port` or `unix:///path`; without `listen`, a free port of loopback."""
        self.target = target
        """Where connections go that are accepted from now on; may be set at any time."""
        self.address = listen or "127.0.0.1:0"
        """Where it listens; the port is known after `start`."""
        self.num_connections = 0
        """Connections accepted since the start."""
        self.num_refused_by_target = 0
        self.bytes_sent = 0
        """Bytes carried from the client to the target."""
        self.bytes_received = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"proxy to {target}", daemon=True)
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._links: set[_Connection] = set()
        self._delay_s = 0.0
        self._events_max = 0
        self._is_silent = False
        self._is_closed = False

    def start(self) -> str:
        """Listen; return the address."""
        self._thread.start()
        self._do(self._listen)
        return self.address

    @property
    def num_open(self) -> int:
        """Connections that are open now."""
        return len(self._links)

    def cut(self) -> None:
        """Reset every connection, and refuse new ones until `heal`."""
        self._do(self._refuse_new)
        self._do(self._reset_all)

    def reset(self) -> None:
        """Reset every connection; new ones are welcome."""
        self._do(self._reset_all)

    def refuse(self) -> None:
        """Refuse new connections until `heal`; those that are open live on."""
        self._do(self._refuse_new)

    def blackhole(self) -> None:
        """Accept and answer nothing until `heal`. What was swallowed is then delivered, as TCP's repetitions are."""
        self._do(self._fall_silent)

    def stall_after(self, num_events: int) -> None:
        """Let each connection carry so many server-sent events more to its client, and then lose it (`lose`)."""

        def change() -> None:
            self._events_max = num_events
            for link in self._links:
                link.num_events = 0

        self._do(change)

    @property
    def num_stalled(self) -> int:
        """Connections that are lost since they have carried all events that they may."""
        return sum(link.is_lost for link in tuple(self._links))

    def lose(self) -> None:
        """Forget the connections that are open: they stay open and silent for ever, whatever heals. New ones work."""
        self._do(self._forget_all)

    def delay(self, delay_ms: float) -> None:
        """Let every chunk wait this long, in each direction, until `heal` or another delay."""

        def change() -> None:
            self._delay_s = delay_ms / 1000

        self._do(change)

    def heal(self) -> None:
        """Undo `cut`, `refuse`, `blackhole`, `delay` and `stall_after`."""
        self._do(self._heal)

    def close(self) -> None:
        """End the thread, the listener and every connection. Harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.is_alive():
            self._do(self._refuse_new)
            self._do(self._reset_all)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CONTROL_DEADLINE_S)
        if self._listener is not None:
            self._listener.close()
        self._loop.close()
        if self.address.startswith(_UNIX):
            Path(self.address.removeprefix(_UNIX)).unlink(missing_ok=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def _do(self, change: Callable[[], object]) -> None:
        async def run() -> None:
            change()
            # What was cancelled lets go before this returns.
            for _ in range(3):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(_CONTROL_DEADLINE_S)

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = _bound(self.address)
        self._listener.listen(256)
        if not self.address.startswith(_UNIX):
            self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self._accepting = self._loop.create_task(self._accept(self._listener))

    def _refuse_new(self) -> None:
        if self._accepting is None or self._listener is None:
            return
        self._accepting.cancel()
        self._accepting = None
        self._loop.remove_reader(self._listener)
        self._listener.close()
        # Bound and not listening: the port refuses, and stays ours. A Unix socket's file that nobody holds refuses.
        self._listener = None if self.address.startswith(_UNIX) else _bound(self.address)

    def _fall_silent(self) -> None:
        self._is_silent = True
        for link in self._links:
            link.flowing.clear()

    def _forget_all(self) -> None:
        for link in self._links:
            link.is_lost = True
            link.flowing.clear()

    def _heal(self) -> None:
        self._is_silent = False
        self._delay_s = 0.0
        self._events_max = 0
        for link in self._links:
            if not link.is_lost:
                link.flowing.set()
        if self._accepting is None:
            self._listen()

    def _reset_all(self) -> None:
        for link in tuple(self._links):
            link.reset()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            client, _ = await self._loop.sock_accept(listener)
            self.num_connections += 1
            link = _Connection(self, client)
            if not self._is_silent:
                link.flowing.set()
            self._links.add(link)
            link.task = self._loop.create_task(link.carry())
            link.task.add_done_callback(lambda _, link=link: self._links.discard(link))


class _Connection:
    """One client's connection and, once it flows, ours to the target."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._upstream: socket.socket | None = None
        self.flowing = asyncio.Event()
        self.is_lost = False
        self.num_events = 0
        """Server-sent events carried to the client since `stall_after`, or since the start."""
        self.task: asyncio.Task[None] | None = None

    async def carry(self) -> None:
        """Carry both directions until both have ended, or one breaks; then both are reset."""
        is_whole = False
        try:
            self._client.setblocking(False)
            await self.flowing.wait()
            try:
                self._upstream = await _connected(self._proxy.target)
            except OSError:
                self._proxy.num_refused_by_target += 1
                return
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(self._client, self._upstream, to_target=True))
                group.create_task(self._pump(self._upstream, self._client, to_target=False))
            is_whole = True
        except* OSError:
            pass
        finally:
            self._close(hard=not is_whole)

    def reset(self) -> None:
        """End at once; a TCP peer sees a reset, not an end of stream."""
        if self.task is not None:
            self.task.cancel()

    def _close(self, *, hard: bool) -> None:
        for end in (self._client, self._upstream):
            if end is None:
                continue
            if hard:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()

    async def _pump(self, source: socket.socket, sink: socket.socket, *, to_target: bool) -> None:
        """One direction: a reader that stamps chunks, and a writer that sends each when its time has come."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_HELD_CHUNKS)
        loop = asyncio.get_running_loop()

        async def read() -> None:
            data = b"-"
            while data:
                data = await loop.sock_recv(source, _CHUNK_BYTES)
                await held.put((loop.time() + self._proxy._delay_s, data))

        async with asyncio.TaskGroup() as group:
            group.create_task(read())
            while True:
                due_s, data = await held.get()
                await asyncio.sleep(max(due_s - loop.time(), 0))
                await self.flowing.wait()
                if not data:
                    break
                if self._proxy._events_max and not to_target:
                    data = self._until_stall(data)
                # Before it is sent: whoever has the bytes sees them counted.
                self._count(len(data), to_target=to_target)
                await loop.sock_sendall(sink, data)
        # The other direction goes on: an end of stream is passed on as one.
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _until_stall(self, data: bytes) -> bytes:
        """Return the bytes that may pass. Those behind the last event are lost, with the connection."""
        events = data.split(_EVENT_END)
        passing = min(len(events) - 1, self._proxy._events_max - self.num_events)
        self.num_events += passing
        if self.num_events < self._proxy._events_max:
            return data
        self.is_lost = True
        self.flowing.clear()
        return b"".join(event + _EVENT_END for event in events[:passing])

    def _count(self, size_bytes: int, *, to_target: bool) -> None:
        if to_target:
            self._proxy.bytes_sent += size_bytes
        else:
            self._proxy.bytes_received += size_bytes


def _bound(address: str) -> socket.socket:
    if address.startswith(_UNIX):
        path = Path(address.removeprefix(_UNIX))
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(os.fspath(path))
    else:
        host, _, port = address.rpartition(":")
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
    listener.setblocking(False)
    return listener


async def _connected(address: str) -> socket.socket:
    is_unix = address.startswith(_UNIX)
    upstream = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET, socket.SOCK_STREAM)
    upstream.setblocking(False)
    host, _, port = address.rpartition(":")
    where = address.removeprefix(_UNIX) if is_unix else (host, int(port))
    try:
        await asyncio.get_running_loop().sock_connect(upstream, where)
    except BaseException:
        upstream.close()
        raise
    return upstream
