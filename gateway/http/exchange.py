"""One HTTP request on ASGI: its head, its bounded body and its answer. Knows no routing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from contextcache.claim import SESSION_HEADER
from contextcache.errors import BodyTooLarge, EngineFailed, NoReadyEndpoint, TooManyInFlight, UploadTooSlow, error_of
from contextcache.requests import joined_headers
from contextcache.terms import IDEMPOTENCY_HEADER
from gateway.flows import REQUEST_ID_HEADER
from gateway.fronts import ClientGone, ErrorAnswer, FrontRequest, header_text
from gateway.tenants.limits import HeldBody

_ANSWER_BYTES_MAX = 16 << 20
"""Largest answer of a background request, in bytes. A summary has a thousandth of it."""
_OF_CLIENT_ALONE = frozenset(
    {SESSION_HEADER, IDEMPOTENCY_HEADER, "if-match", "x-usage-format", "x-keep-alive-comments", "accept-encoding"}
    | {"content-type", "content-length", "content-encoding", "transfer-encoding"}
)
"""Headers of a client's request that a background request for it does not have."""


class Exchange(FrontRequest):
    """One request and its answer. Each answer has `x-request-id`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.raw_headers: list[tuple[str, str]] = [
            (name.decode("latin-1").lower(), header_text(value)) for name, value in scope["headers"]
        ]
        # The path is decoded, as in the pod's router.
        super().__init__(scope["method"], scope["path"], joined_headers(self.raw_headers))
        self.status: int | None = None
        """Status of the answer; None until it has started."""
        self._send = send

    @property
    def target(self) -> str:
        """Path and query, encoded as the client sent them."""
        raw: bytes = self.scope.get("raw_path") or self.path.encode()
        query: bytes = self.scope.get("query_string", b"")
        # raw_path of some servers has the query too.
        path = raw.partition(b"?")[0].decode("latin-1")
        return f"{path}?{query.decode('latin-1')}" if query else path

    async def read_body(self, held: HeldBody) -> bytes:
        """Return the whole body and count it in `held`.

        Raises BodyTooLarge, UploadTooSlow, NoReadyEndpoint, TooManyInFlight, ClientGone.
        """
        more = True
        try:
            held.reserve(self.declared_bytes)
            while more:
                piece, more = await self._piece(held)
                held.add(piece)
        except (BodyTooLarge, NoReadyEndpoint, TooManyInFlight):
            if more:
                await self._discard_body(held)
            raise
        return held.whole()

    async def _piece(self, held: HeldBody) -> tuple[bytes, bool]:
        message = await held.wait_for(self.receive())
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message.get("body", b""), message.get("more_body", False)

    async def _discard_body(self, held: HeldBody) -> None:
        """Read a refused body within the bounds of any body, because most clients read the answer after they sent all.

        Some proxies break the client's connection if the answer precedes the end of the body.
        """
        with suppress(BodyTooLarge, UploadTooSlow):
            more = True
            while more:
                piece, more = await self._piece(held)
                held.came(len(piece))

    async def send(self, message: Message) -> None:
        """Send one ASGI message. The first one gets the request id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (REQUEST_ID_HEADER.encode(), self.request_id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the head of the answer."""
        await self.send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def send_error(self, answer: ErrorAnswer) -> None:
        """Send the answer unless another one has started."""
        if self.status is not None:
            return
        headers = [(name.encode(), value.encode()) for name, value in answer.headers]
        await self.start(answer.status, [*headers, (b"content-length", str(len(answer.body)).encode())])
        await self.send({"type": "http.response.body", "body": answer.body})


class BackgroundExchange(Exchange):
    """A request that the gateway sends for a client's, and its answer in memory. It ends when the client leaves."""

    def __init__(self, client: Exchange, path: str, headers: Mapping[str, str]) -> None:
        """`headers` replace the client's."""
        self._body = bytearray()
        self._retry_after = ""
        ours = {"content-type": "application/json", **headers}
        kept = [pair for pair in client.raw_headers if pair[0] not in {*_OF_CLIENT_ALONE, *ours}]
        pairs = [(name.encode(), text.encode()) for name, text in (*kept, *ours.items())]
        scope = {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": pairs}
        super().__init__({**client.scope, **scope}, client.receive, self._keep)

    async def _keep(self, message: Message) -> None:
        for name, value in message.get("headers", ()):
            if name == b"retry-after":
                self._retry_after = value.decode("latin-1")
        self._body += message.get("body", b"")
        if len(self._body) > _ANSWER_BYTES_MAX:
            raise EngineFailed("the engine's answer has no end")

    def answer(self) -> dict[str, Any]:
        """Return the answer. Raises the error that it is."""
        try:
            told = msgspec.json.decode(self._body, type=dict[str, Any])
        except msgspec.DecodeError as exc:
            raise EngineFailed("the pod's answer is not valid") from exc
        if self.status != 200:  # OK
            after_s = int(self._retry_after[:4]) if self._retry_after.isdecimal() else None
            raise error_of(self.status or 0, told, retry_after_s=after_s)
        return told
