"""A bound on the connections of one port that nobody uses up by merely holding some. Imports asyncio only."""

from __future__ import annotations

import asyncio


class ConnectionLimit:
    """At most so many open connections; a new one takes the place of the oldest that has asked for nothing yet.

    So who opens connections and says nothing, or reads nothing, keeps no probe out. For one event loop.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._open: dict[asyncio.WriteTransport, None] = {}
        """The oldest first."""
        self._silent: dict[asyncio.WriteTransport, None] = {}
        """Those of them that have asked for nothing."""

    def admit(self, transport: asyncio.WriteTransport) -> None:
        """Count a new connection, in place of another one when there are as many as there may be."""
        if len(self._open) >= self._max_connections:
            self.end(next(iter(self._silent or self._open)))
        self._open[transport] = self._silent[transport] = None

    def note_asked(self, transport: asyncio.WriteTransport) -> None:
        """Prefer those that are silent to a connection that has sent a whole request, when one has to go."""
        self._silent.pop(transport, None)

    def end(self, transport: asyncio.WriteTransport) -> None:
        """Abort a connection, which frees its place; harmless when repeated."""
        self._open.pop(transport, None)
        self._silent.pop(transport, None)
        transport.abort()
