"""HTTP/2 without a library: one request with the frames a test wants, as no client of ours would send it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Mapping

from tests.kit.gateway_server import DEADLINE_S

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1


async def post(
    port: int,
    path: str,
    headers: Mapping[str, str] | Iterable[tuple[str, str]],
    *,
    body: bytes | None = None,
    trailers: Mapping[str, str] | None = None,
) -> bytes:
    """Send a POST and return the body of the answer. No body: no frame of data; then there have to be trailers.

    A body says its size, as clients do.
    """
    pseudo = {":method": "POST", ":path": path, ":scheme": "http", ":authority": "g"}
    pairs = [*pseudo.items(), *(headers.items() if isinstance(headers, Mapping) else headers)]
    if body is not None:
        pairs.append(("content-length", str(len(body))))
    sent = [_frame(_SETTINGS, 0, 0, b""), _frame(_HEADERS, _END_HEADERS, 1, _literals(pairs))]
    if body is not None:
        sent.append(_frame(_DATA, 0 if trailers else _END_STREAM, 1, body))
    if trailers:
        sent.append(_frame(_HEADERS, _END_HEADERS | _END_STREAM, 1, _literals(trailers.items())))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_PREFACE + b"".join(sent))
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await _answer(reader, writer)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    body = b""
    while True:
        head = await reader.readexactly(9)
        kind, flags = head[3], head[4]
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        assert kind not in {_RST, _GOAWAY}, payload
        if kind == _SETTINGS and not flags & _ACK:
            writer.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind in {_DATA, _HEADERS}:
            body += payload if kind == _DATA else b""
            if flags & _END_STREAM:
                return body


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literals(headers: Iterable[tuple[str, str]]) -> bytes:
    """Return headers as HPACK literals, not indexed, without Huffman coding."""
    found = bytearray()
    for name, value in headers:
        assert max(len(name), len(value)) < 127
        found += bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return bytes(found)
