"""A gRPC server as one that was stopped: it took the connection, gave room for large requests, and reads nothing."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

_SETTINGS, _WINDOW_UPDATE = 4, 8
_INITIAL_WINDOW_SIZE = 4
_WINDOW = 2**31 - 1


def _frame(kind: int, payload: bytes) -> bytes:
    """Return an HTTP/2 frame (RFC 9113, section 4.1) without flags, of the whole connection."""
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + bytes(4) + payload


_GREETING = _frame(_SETTINGS, _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + _WINDOW.to_bytes(4, "big")) + _frame(
    _WINDOW_UPDATE, (_WINDOW - 65535).to_bytes(4, "big")
)
"""After it a client writes as much as the socket takes, as to a server that took large requests before it stopped."""


class SilentServer:
    """A context manager over a Unix socket or a port of loopback."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: of the Unix socket; None: listen on loopback."""
        self._listener = socket.socket(socket.AF_INET if path is None else socket.AF_UNIX)
        self._listener.bind(("127.0.0.1", 0) if path is None else str(path))
        self._listener.listen()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}" if path is None else f"unix://{path}"
        self.num_connections = 0
        self._connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> SilentServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for end in (self._listener, *self._connections):
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # The first client meets a server that answers its greeting and stops then, later ones a stopped server.
            if not self._connections:
                connection.sendall(_GREETING)
            self._connections.append(connection)
            self.num_connections += 1
