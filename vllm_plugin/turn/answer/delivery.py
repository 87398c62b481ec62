"""Between the engine's `send` and the client's: edit the answer, settle the turn before its last byte.

ASGI messages in, ASGI messages out; the story decides the meaning of a turn. An answer other than 200 is the engine's
own error: `check_complete` raises it, with its words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from contextcache.errors import ContextCacheError, EngineFailed
from contextcache.process.crash_points import crash_point
from vllm_plugin.turn.answer.chat import JsonAnswer, SseAnswer
from vllm_plugin.turn.answer.events import Event
from vllm_plugin.turn.answer.rest import Rest
from vllm_plugin.turn.crash_points import COMMITTED, MID_STREAM
from vllm_plugin.turn.engine import Message
from vllm_plugin.turn.refusals import engine_error
from vllm_plugin.turn.turn import AnsweredRequest
from vllm_plugin.turn.waiting import TurnPatience

_REFUSAL_BYTES_MAX = 1 << 20
"""Limit of an error's body; a longer one holds no message."""
_REPLACED_HEADERS = frozenset({b"content-length", b"server-timing"})


class Settling(Protocol):
    """The end of a request on our side, around its answer's bytes."""

    async def stream_receipt(self, turn: Any, /) -> list[tuple[str, str]]:
        """Return a stream's headers at its first token."""

    async def settle(self, turn: Any, answer: JsonAnswer | SseAnswer, /) -> tuple[list[tuple[str, str]], bytes]:
        """End the request. Return the headers and the end of the client's answer."""

    async def abort(self, turn: Any, /) -> None:
        """End a request whose answer broke off."""


@dataclass
class Delivery:
    """Delivers one answer. The turn is settled once, after the engine's last token."""

    turn: AnsweredRequest
    settlement: Settling
    reader: Callable[[], JsonAnswer | SseAnswer]
    """Returns a reader of the engine's answer that writes the client's."""
    on_read: Callable[[], None]
    """Called before a part of the answer is delivered."""
    patience: TurnPatience = field(init=False)
    """Patience with the engine that is asked now."""
    complete: bool = False
    """The client has been sent everything."""
    _start: Message = field(default_factory=dict)
    _refused: bytearray = field(default_factory=bytearray)
    failure: ContextCacheError | None = None
    """Fault of the engine's answer."""

    def __post_init__(self) -> None:
        """Make the reader of the engine's answer, which writes the client's."""
        self.answer = self.reader()
        self._client, self._recording = self.turn.client, self.turn.recording

    def begin_part(self, rest: Rest | None) -> None:
        """Read on after a break, from another engine. Nothing of a whole answer has been delivered: read it anew."""
        self.failure, self._start = None, {}
        self._refused.clear()
        if isinstance(self.answer, SseAnswer):
            self.answer.begin_rest(rest)
        else:
            self.answer = self.reader()

    async def take(self, message: Message) -> None:
        """Take one ASGI message of the engine's.

        An answer that cannot be read is remembered for `check_complete`: an exception raised here would pass through
        vLLM's own error handlers, which answer a second time.
        """
        if self.failure is not None:
            return
        try:
            await self._take(message)
        except ContextCacheError as exc:
            self.failure = exc
            if message.get("more_body"):
                # The rest is not read: the engine need not compute it, nor the client and the session wait for it.
                self.patience.lose("engine")

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            if self._recording is not None:
                content_type = dict(message.get("headers", ())).get(b"content-type", b"application/json")
                self._recording.content_type = content_type.decode("latin-1")
            return
        if message["type"] != "http.response.body":
            await self.patience.with_client(self._client.send(message))
            return
        self.patience.heard_engine()
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._start["status"] != 200:
            self._take_refusal(body, more=more)
            return
        passing = self.answer.feed(body)
        if passing or self.answer.result.finish_reason:
            self.on_read()
        if passing:  # of a stream alone
            if not self._client.keep_alive.has_begun:
                await self._begin_stream()
            if self._recording is not None:
                self._recording.add(passing)
            await self._send_body(passing, more=True)
            crash_point(MID_STREAM)
        if self.answer.is_over(more=more):
            await self.end()

    def _take_refusal(self, body: bytes, *, more: bool) -> None:
        self._refused += body[: _REFUSAL_BYTES_MAX - len(self._refused)]
        if not more:
            raise engine_error(self._start["status"], bytes(self._refused))

    async def end(self) -> None:
        """Settle the turn of a whole answer, and send its end. Raises EngineFailed, NoReadyEndpoint."""
        self.answer.complete()
        self.on_read()
        if isinstance(self.answer, SseAnswer) and not self._client.keep_alive.has_begun:
            await self._begin_stream()
        with self.patience.with_ourselves():
            headers, end = await self.settlement.settle(self.turn, self.answer)
        crash_point(COMMITTED)
        if not self._client.keep_alive.has_begun:
            await self._send_start([*headers, ("content-length", str(len(end)))])
        await self._send_body(end, more=False)

    async def _begin_stream(self) -> None:
        headers = await self.settlement.stream_receipt(self.turn)
        if self._recording is not None:
            self._recording.head = headers
        await self._send_start(headers)

    async def _send_start(self, headers: list[tuple[str, str]]) -> None:
        ours = [(name.encode(), value.encode()) for name, value in headers]
        replaced = _REPLACED_HEADERS | {name for name, _ in ours}
        kept = [(name, value) for name, value in self._start.get("headers", []) if name.lower() not in replaced]
        await self.patience.with_client(self._client.send({**self._start, "headers": kept + ours}))

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        part = {"type": "http.response.body", "body": body, "more_body": more}
        await self.patience.with_client(self._client.send(part))
        self.complete = self.complete or not more

    async def send_refusal(self) -> bool:
        """Send the engine's own error, as it wrote it; return whether there is one."""
        if self._start.get("status", 200) == 200 or self._client.keep_alive.has_begun:
            return False
        await self._client.send(self._start)
        await self._client.send({"type": "http.response.body", "body": bytes(self._refused), "more_body": False})
        return True

    async def tell_error(self, error: Event) -> None:
        """End a stream with the error that its engine told in it."""
        assert isinstance(self.answer, SseAnswer), "a stream's"
        if not self._client.keep_alive.has_begun:
            await self._begin_stream()
        with self.patience.with_ourselves():
            await self.settlement.abort(self.turn)
        await self._send_body(self.answer.failing(error), more=False)

    def check_complete(self) -> None:
        """Raise the failure, or EngineFailed or NoReadyEndpoint when the engine ended before its answer did."""
        if self.failure is not None:
            raise self.failure
        if self.complete:
            return
        if isinstance(self.answer, SseAnswer) and self.answer.gave_up:
            raise self.answer.result.given_up()
        if lost_with := self.patience.lost_with:
            raise EngineFailed(f"the {lost_with} left or reached its time limit")
        raise EngineFailed("the engine closed the connection before its answer ended")
