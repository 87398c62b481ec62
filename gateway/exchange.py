"""One HTTP request on ASGI: its head, its body up to a bound, its answer. Knows nothing of routing."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from contextcache.error_body import error_body, error_headers
from contextcache.errors import ContextCacheError, InvalidRequest
from contextcache.request_headers import joined_headers
from gateway.auth import AUTHENTICATE
from gateway.body_budget import HeldBody
from gateway.paths import MethodNotAllowed

REQUEST_ID_HEADER = "x-request-id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


class Exchange:
    """One request and its answer. Every answer gets `x-request-id`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        """Decoded: what the pod's router will see too."""
        self.raw_headers: list[tuple[str, str]] = [
            (name.decode("latin-1").lower(), header_text(value)) for name, value in scope["headers"]
        ]
        self.headers = joined_headers(self.raw_headers)
        self.minted_id = mint_request_id()
        """Names the request among our parts; never the client's choice."""
        self.request_id = plain_request_id(self.headers) or self.minted_id
        """Names the request in answers and towards the engine: the client's own id when it sent a plain one."""
        self.status: int | None = None
        """Status sent; None until the answer has started."""
        self._send = send

    @property
    def target(self) -> str:
        """Path and query as they were sent, still encoded."""
        raw: bytes = self.scope.get("raw_path") or self.path.encode()
        query: bytes = self.scope.get("query_string", b"")
        # Some servers put the query into raw_path as well.
        path = raw.partition(b"?")[0].decode("latin-1")
        return f"{path}?{query.decode('latin-1')}" if query else path

    async def read_body(self, held: HeldBody, *, idle_timeout_s: float) -> bytes:
        """Return the whole body, which is in `held` then.

        Raises BodyTooLarge, InvalidRequest when it stops coming, NoReadyEndpoint, TooManyInFlight, ClientGone.
        """
        declared = self.headers.get("content-length", "")
        if declared.isdecimal():
            held.expect(int(declared))
        more = True
        while more:
            message = await self._receive_within(idle_timeout_s)
            held.add(message.get("body", b""))
            more = message.get("more_body", False)
        return held.whole()

    async def disconnected(self) -> None:
        """Return when the client has closed the connection. Only after the body is read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def send(self, message: Message) -> None:
        """Send one ASGI message; the first one gets the request id."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (REQUEST_ID_HEADER.encode(), self.request_id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Send the head of the answer."""
        await self.send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def send_error(self, error: ContextCacheError) -> None:
        """Answer with the error's status and body."""
        body = error_body(error)
        headers = [(name.encode(), value.encode()) for name, value in answer_headers(error)]
        await self.start(error.http_status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.send({"type": "http.response.body", "body": body})

    async def _receive_within(self, timeout_s: float) -> MutableMapping[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                message = await self.receive()
        except TimeoutError as exc:
            raise InvalidRequest("the rest of the request body did not come in time") from exc
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message


def answer_headers(error: ContextCacheError) -> list[tuple[str, str]]:
    """Return the headers of an error's answer."""
    headers = error_headers(error)
    if error.http_status == 401:
        headers.append(("www-authenticate", AUTHENTICATE))
    if error.http_status == 503 and error.retry_after_s is None:
        headers.append(("retry-after", "1"))
    if isinstance(error, MethodNotAllowed) and error.allow:
        headers.append(("allow", error.allow))
    return headers


def mint_request_id() -> str:
    """Return a new name for a request."""
    return f"req_{uuid.uuid4().hex}"


def plain_request_id(headers: Mapping[str, str]) -> str:
    """Return the client's own name for a request; empty when there is none, or not a plain one."""
    asked = headers.get(REQUEST_ID_HEADER, "")
    return asked if _REQUEST_ID.fullmatch(asked) else ""


def header_text(value: bytes) -> str:
    """Return a header's value as text, whatever its bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
