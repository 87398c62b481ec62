"""A request whose client has already sent the next one hears it too when that client goes.

uvicorn (0.54, protocols/http/httptools_impl.py, `connection_lost`) tells the newest request of a connection alone. The
one being answered would go on, with the pod behind it, until it wrote to a connection that is closed.
"""

from __future__ import annotations

from typing import Any


def told_of_the_end(protocol: Any) -> Any:
    """Return uvicorn's `protocol`, whichever of its two it is; h11 reads no request before the last is answered."""

    class ToldOfTheEnd(protocol):  # type: ignore[misc]  # a class known at run time
        _answered: Any = None
        """The request that has a task: one at a time, and none is started on a closed connection."""

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self._answered = cycle
            super()._start_asgi_task(cycle, app)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._answered is not None and not self._answered.response_complete:
                self._answered.disconnected = True
                self._answered.message_event.set()

    return ToldOfTheEnd if hasattr(protocol, "_start_asgi_task") else protocol
