"""A client's `send`. Comments keep a silent stream open: proxies cut connections on which no byte comes for a while.

A cold prompt is silent until its first token. A client that asks for it gets the head of its stream and a comment
after some seconds of silence. Each further silence of the same length gets another comment. Readers of server-sent
events skip comments. An error that follows is an event, since the status has been sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from contextcache.claim import RESPONSES_PATH
from contextcache.errors import EngineFailed, InvalidRequest, error_object
from vllm_plugin.turn.answer.events import UNBUFFERED, begins_stream
from vllm_plugin.turn.engine import Message, Send
from vllm_plugin.turn.prompt.request import MESSAGES_PATH

HEADER = "x-keep-alive-comments"
_SECONDS = frozenset(map(str, range(1, 61)))
"""The usual limits of proxies are 60 s (nginx, AWS load balancers) and more."""
_COMMENT = b": keep-alive\n\n"
_HEAD: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), *UNBUFFERED],
}
_COMMENT_DEADLINE_S = 1.0
"""Wait at the end of an answer for a comment on its way, which a client that reads nothing holds up."""
_ERROR_BYTES_MAX = 1 << 20
"""A longer body is no error of the engine's."""


def read_keep_alive(headers: Mapping[str, str]) -> int | None:
    """Return the seconds of silence after which a client wants a comment; None: never. Raises InvalidRequest."""
    said = headers.get(HEADER)
    if said is None:
        return None
    if said not in _SECONDS:
        raise InvalidRequest(
            f"X-Keep-Alive-Comments must be a whole number of seconds from 1 to {len(_SECONDS)}", param=HEADER
        )
    return int(said)


class KeepAlive:
    """A client's `send` that puts comments into silences while the engine answers (`filling`).

    It tells proxies not to hold a stream back.
    """

    def __init__(self, send: Send, path: str, silence_s: int | None = None) -> None:
        """`path`: path of the request. It decides the format of errors. `silence_s`: None for no comments."""
        self._send = send
        self._path = path
        self.silence_s = silence_s
        self._sending = asyncio.Lock()
        self._heard_s = 0.0
        """Time of the loop at which the application, or a comment, was last sent. A silence is measured from it."""
        self.has_begun = False
        """The application has sent a head."""
        self._is_ours = False
        """A head came from here, before the application's."""
        self._is_stream = True
        """More events may be sent."""
        self._ends_event = True
        """The client has whole events only: a comment would be part of none."""
        self._over = asyncio.Event()
        """The engine has answered: no more comments."""
        self._failed: bytearray | None = None
        """Body of an error that came after the status had been sent."""

    async def __call__(self, message: Message) -> None:
        """Send a message of the application's."""
        async with self._sending:
            self._heard_s = asyncio.get_running_loop().time()
            if message["type"] == "http.response.start":
                await self._start(message)
            elif message["type"] == "http.response.body" and self._failed is not None:
                await self._fail(self._failed, message)
            else:
                if body := message.get("body", b""):
                    self._ends_event = body.endswith((b"\n\n", b"\n\r\n"))
                self._is_stream = self._is_stream and message.get("more_body", False)
                await self._send(message)

    async def _start(self, message: Message) -> None:
        self.has_begun = True
        if self._is_ours:
            self._failed = None if message["status"] == 200 else bytearray()
            return
        self._is_stream = begins_stream(message) and message["status"] == 200
        if begins_stream(message):
            headers = list(message["headers"])
            said = {name.lower() for name, _ in headers}
            message = {**message, "headers": headers + [told for told in UNBUFFERED if told[0] not in said]}
        await self._send(message)

    async def _fail(self, body: bytearray, message: Message) -> None:
        body += message.get("body", b"")[: _ERROR_BYTES_MAX - len(body)]
        if not message.get("more_body"):
            event = _error_event(self._path, bytes(body))
            await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def comment(self) -> None:
        """Send a comment in a stream that has begun, whether or not the client asked for comments."""
        async with self._sending:
            if self.has_begun or self._is_ours:
                await self._comment()

    @asynccontextmanager
    async def filling(self, *, stream: bool) -> AsyncIterator[None]:
        """Send comments into silences inside the block, where a stream is answered in it."""
        if self.silence_s is None or not stream:
            yield
            return
        task = asyncio.create_task(self._fill(self.silence_s))
        try:
            yield
        finally:
            self._over.set()
            # A head that is cancelled on its way may have been sent or not.
            await asyncio.wait([task], timeout=_COMMENT_DEADLINE_S)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _fill(self, silence_s: int) -> None:
        loop = asyncio.get_running_loop()
        heard_s = self._heard_s = loop.time()
        while not self._over.is_set():
            try:
                async with asyncio.timeout_at(heard_s + silence_s):
                    await self._over.wait()
            except TimeoutError:
                async with self._sending:
                    if heard_s == self._heard_s:
                        await self._comment()
                        self._heard_s = loop.time()
                    heard_s = self._heard_s

    async def _comment(self) -> None:
        if self._over.is_set() or self._failed is not None or not (self._is_stream and self._ends_event):
            return
        if not (self.has_begun or self._is_ours):
            self._is_ours = True
            await self._send(_HEAD)
        await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})


def _error_event(path: str, body: bytes) -> bytes:
    """Return an error's body as the last events of a stream, as the API of the path has them."""
    try:
        said = json.loads(body)["error"]
        message = str(said["message"])
    except (ValueError, LookupError, TypeError):
        said = error_object(EngineFailed("the engine's error is not valid"))
        message = str(said["message"])
    if path == MESSAGES_PATH:
        return b"event: error\ndata: %b\n\n" % json.dumps({"type": "error", "error": said}).encode()
    if path == RESPONSES_PATH:
        code, param = said.get("code"), said.get("param")
        told = {"type": "error", "code": code, "message": message, "param": param, "sequence_number": 0}
        return b"event: error\ndata: %b\n\n" % json.dumps(told).encode()
    return b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"error": said}).encode()
