"""Between the engine's `send` and the client's: edit the answer, settle the turn before its last byte.

ASGI messages in, ASGI messages out; the story decides the meaning of a turn. An answer other than 200 is the engine's
own error: `check_complete` raises it, with its words.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from contextcache.errors import ContextCacheError, EngineFailed
from contextcache.process.crash_points import crash_point
from vllm_plugin.turn.answer.chat import AnswerResult, JsonAnswer, SseAnswer
from vllm_plugin.turn.answer.repeats import Recording
from vllm_plugin.turn.crash_points import COMMITTED, MID_STREAM
from vllm_plugin.turn.engine import Message, Send
from vllm_plugin.turn.refusals import engine_error
from vllm_plugin.turn.waiting import TurnPatience

_REFUSAL_BYTES_MAX = 1 << 20
"""Limit of an error's body; a longer one holds no message."""
_REPLACED_HEADERS = frozenset({b"content-length", b"server-timing"})


Render: TypeAlias = Callable[[dict[str, Any], dict[str, Any]], bytes]
"""The end of an answer, or all of it, from its usage and its session fields. May be called more than once."""


@dataclass(frozen=True, slots=True)
class Closing:
    """How the turn ended, as the client is told."""

    usage: dict[str, Any]
    session: dict[str, Any]
    """Fields added beside `usage`: session_id, expires_at."""
    headers: list[tuple[str, str]]


@dataclass
class Delivery:
    """Delivers one answer. `settle` commits the turn; it is awaited once, after the engine's last token."""

    answer: JsonAnswer | SseAnswer
    """Reads the engine's answer and makes the client's."""
    send: Send
    patience: TurnPatience
    receipt: Callable[[], Awaitable[list[tuple[str, str]]]]
    """Returns a stream's headers, at its first token."""
    settle: Callable[[AnswerResult, Render], Awaitable[Closing]]
    abort: Callable[[], Awaitable[None]]
    """Ends a turn whose stream has an error event."""
    recording: Recording | None
    """Records the answer, but for the end, which `settle` renders itself."""
    complete: bool = False
    """The client has been sent everything."""
    started: bool = False
    """The client has been sent a part: an error can no longer be told by status."""
    _start: Message = field(default_factory=dict)
    _refused: bytearray = field(default_factory=bytearray)
    _failure: ContextCacheError | None = None

    async def take(self, message: Message) -> None:
        """Take one ASGI message of the engine's.

        An answer that cannot be read is remembered for `check_complete`: an exception raised here would pass through
        vLLM's own error handlers, which answer a second time.
        """
        if self._failure is not None:
            return
        try:
            await self._take(message)
        except ContextCacheError as exc:
            self._failure = exc
            if message.get("more_body"):
                # The rest is not read: the engine need not compute it, nor the client and the session wait for it.
                self.patience.lose("engine")

    async def _take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            if self.recording is not None:
                self.recording.content_type = _content_type(message)
            return
        if message["type"] != "http.response.body":
            with self.patience.with_client():
                await self.send(message)
            return
        self.patience.heard_engine()
        body, more = message.get("body", b""), message.get("more_body", False)
        if self._start["status"] != 200:
            self._take_refusal(body, more=more)
        else:
            await self._take_body(body, more=more)

    def _take_refusal(self, body: bytes, *, more: bool) -> None:
        self._refused += body[: _REFUSAL_BYTES_MAX - len(self._refused)]
        if not more:
            raise engine_error(self._start["status"], bytes(self._refused))

    async def _take_body(self, body: bytes, *, more: bool) -> None:
        if passing := self.answer.feed(body):  # of a stream alone
            await self._begin_stream()
            if self.recording is not None:
                self.recording.add(passing)
            await self._send_body(passing, more=True)
            crash_point(MID_STREAM)
        if more:
            return
        self.answer.complete()
        if isinstance(self.answer, SseAnswer):
            await self._begin_stream()
        if self.answer.result.error:
            with self.patience.with_ourselves():
                await self.abort()
            await self._send_body(b"", more=False)
            return
        with self.patience.with_ourselves():
            closing = await self.settle(self.answer.result, self.answer.closing)
        crash_point(COMMITTED)
        payload = self.answer.closing(closing.usage, closing.session)
        if not self.started:
            await self._send_start(200, [*closing.headers, ("content-length", str(len(payload)))])
        await self._send_body(payload, more=False)

    async def _begin_stream(self) -> None:
        if not self.started:
            headers = await self.receipt()
            if self.recording is not None:
                self.recording.begin(headers)
            await self._send_start(200, headers)

    async def _send_start(self, status: int, headers: list[tuple[str, str]]) -> None:
        ours = [(name.encode(), value.encode()) for name, value in headers]
        replaced = _REPLACED_HEADERS | {name for name, _ in ours}
        kept = [(name, value) for name, value in self._start.get("headers", []) if name.lower() not in replaced]
        self.started = True
        with self.patience.with_client():
            await self.send({**self._start, "status": status, "headers": kept + ours})

    async def _send_body(self, body: bytes, *, more: bool) -> None:
        with self.patience.with_client():
            await self.send({"type": "http.response.body", "body": body, "more_body": more})
        self.complete = self.complete or not more

    def close(self) -> None:
        """Read no more."""
        self.answer.close()

    def check_complete(self, *, lost_with: str) -> None:
        """Raise the failure, or EngineFailed when the engine ended before its answer did.

        `lost_with`: the side that reached its time limit; empty: none.
        """
        if self._failure is not None:
            raise self._failure
        if not self.complete:
            raise EngineFailed(
                f"the {lost_with} reached its time limit"
                if lost_with
                else "the engine closed the connection before its answer ended"
            )


def _content_type(start: Message) -> str:
    found = (value for name, value in start.get("headers", []) if name.lower() == b"content-type")
    return next(found, b"application/json").decode("latin-1")
