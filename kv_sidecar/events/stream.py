"""The stream of events over ZeroMQ, as vLLM's `ZmqEventPublisher`: a PUB socket, and a ROUTER socket for replays.

A batch is (topic, sequence number of 8 bytes, msgpack of [Unix time in s, events, 0]). A subscriber that misses numbers
asks for a replay from the first one: the last batches again, or everything that is stored now. Numbers go on upwards
over restarts, so that a new process is such a gap too. A slow subscriber loses batches; this process never waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec
import zmq
import zmq.asyncio

from kv_sidecar.events.view import CLEARED, Event, EventView
from kv_sidecar.runtime import Runtime

log = logging.getLogger(__name__)

_BATCH_BLOCKS = 64
"""Blocks in a batch: 64 KiB of token ids, encoded within a millisecond."""
_BATCHES_KEPT = 256
"""Batches for replays: 16 MiB. As many may wait for each slow subscriber."""
_TOGETHER_S = 0.05
"""Wait after a change, for more of the same save, and after a replay: a flood of requests costs little."""
_BEAT_S = 10.0
"""Time after which an empty batch follows the last one: a subscriber then notices batches it has missed."""
_REQUEST_BYTES_MAX = 1024
"""Longest message that a subscriber may send: the beginning of a topic, or a number."""
_END = (-1).to_bytes(8, "big", signed=True)
Batch = tuple[int, bytes]
"""Sequence number and payload."""


class EventStream:
    """Publishes the changes of a view, from `open` to `close`."""

    def __init__(self, view: EventView, runtime: Runtime, *, listen: str, topic: str) -> None:
        """`listen`: host:port of the events. Replays have the next port."""
        self._view, self._runtime = view, runtime
        self._host, _, port = listen.rpartition(":")
        self._port = int(port)
        self._topic = topic.encode()
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.asyncio.Context()
        self._events: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUB)  # never waits, so no loop has to
        self._replays = self._context.socket(zmq.ROUTER)
        self._replays.copy_threshold = 0  # with `copy=False`: subscribers that do not read share one snapshot's memory
        self._last = 0
        """Number of the last batch."""
        self._kept = deque[Batch](maxlen=_BATCHES_KEPT)
        self._snapshot: list[Batch] = []
        """Everything stored, as of the last batch; empty: to be made."""
        self._tasks: list[asyncio.Task[None]] = []

    def open(self) -> None:
        """Bind both sockets and publish from now on. Raises OSError when an address is taken."""
        for socket, port in ((self._events, self._port), (self._replays, self._port + 1)):
            socket.setsockopt(zmq.SNDHWM, 2 * (_BATCHES_KEPT + 1))  # a whole replay, whatever was sent before
            socket.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES_MAX)
            socket.setsockopt(zmq.IPV6, self._host.startswith("["))
            try:
                socket.bind(f"tcp://{self._host}:{port}")
            except zmq.ZMQError as exc:
                raise OSError(exc.errno, f"{exc.strerror}: {self._host}:{port} for events") from exc
        # Microseconds: no process publishes as many batches in its time.
        self._last = self._runtime.clock.now_ms() * 1000
        self._publish([CLEARED])
        self._tasks = [asyncio.create_task(self._publish_changes()), asyncio.create_task(self._serve_replays())]
        for task in self._tasks:
            task.add_done_callback(_log_end)

    async def close(self) -> None:
        """Stop publishing. Batches that no subscriber has fetched are lost, as after a crash."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for socket in (self._events, self._replays):
            socket.close(linger=0)
        self._context.term()

    async def _publish_changes(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_BEAT_S):
                    await self._view.changed.wait()
            except TimeoutError:
                self._publish([])
            else:
                await asyncio.sleep(_TOGETHER_S)
                while self._view.changed.is_set():
                    if events := self._view.take(_BATCH_BLOCKS):
                        self._publish(events)
                    await asyncio.sleep(0)

    def _publish(self, events: Sequence[Event]) -> None:
        self._last += 1
        batch = self._last, self._payload(events)
        self._kept.append(batch)
        self._snapshot = []
        self._events.send_multipart((self._topic, *_frames(batch)), flags=zmq.NOBLOCK)  # drops, never waits
        for event in events:
            self._runtime.metrics.events.labels(event["type"]).inc()

    def _payload(self, events: Sequence[Event]) -> bytes:
        return self._encode([self._runtime.clock.now_ms() / 1000, events, 0])  # 0: data-parallel rank

    async def _serve_replays(self) -> None:
        while True:
            client, *request = await self._replays.recv_multipart()
            if len(request) != 2 or len(request[1]) != len(_END):
                continue
            first = int.from_bytes(request[1], "big")
            is_kept = first >= self._kept[0][0]
            batches = [it for it in self._kept if it[0] >= first] if is_kept else await self._all_blocks()
            for batch in batches:
                await self._replays.send_multipart((client, b"", self._topic, *_frames(batch)), copy=False)
            await self._replays.send_multipart((client, b"", b"", _END, b""))
            self._runtime.metrics.replays.labels("batches" if is_kept else "snapshot").inc()
            await asyncio.sleep(_TOGETHER_S)

    async def _all_blocks(self) -> list[Batch]:
        """Return batches with everything that is stored, which end with the number of the last batch published.

        There are at most as many as are kept: the first number is then one that the subscriber has not had.
        """
        if not self._snapshot:
            last, blocks = self._last, self._view.snapshot()
            size = max(-(-len(blocks) // len(self._kept)), _BATCH_BLOCKS)
            parts = [blocks[first : first + size] for first in range(0, len(blocks), size)] or [[]]
            payloads = await self._runtime.threads.run(lambda: list(self._payloads(parts)))
            snapshot = list(zip(range(last - len(parts) + 1, last + 1), payloads, strict=True))
            if last != self._last:
                return snapshot  # this subscriber has the batches that were published meanwhile
            self._snapshot = snapshot
        return self._snapshot

    def _payloads(self, parts: Sequence[Sequence[Iterator[Event]]]) -> Iterator[bytes]:
        for number, part in enumerate(parts):
            events = list(chain.from_iterable(part))
            yield self._payload(events if number else [CLEARED, *events])


def _frames(batch: Batch) -> tuple[bytes, bytes]:
    return batch[0].to_bytes(8, "big"), batch[1]


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.error("events ended until the next start", exc_info=exc)
