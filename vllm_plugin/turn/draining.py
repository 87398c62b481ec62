"""An API server that was told to end, and says so at once.

vLLM 0.32 lets running answers finish (`--shutdown-timeout`), but keeps its port open and `/health` at 200 meanwhile,
and fails what comes; what has not finished when it kills its engine then gets neither another token nor an end
(entrypoints/launchers/launcher.py serve_http). A router must hear of it, a turn that comes now is another pod's, and
one that runs too long is given up, so that its client and its session are free before the process is killed.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from types import FrameType


class Draining:
    """Whether SIGTERM or SIGINT was heard. Whoever else listens for them hears them too."""

    def __init__(self, *, timeout_s: float, give_up: Callable[[], None]) -> None:
        """`give_up` is called in the loop, `timeout_s` after the first signal."""
        self.value = False
        self._timeout_s = timeout_s
        self._give_up = give_up

    def listen(self) -> None:
        """Hear the signals from now on; to be called in the running loop, once the server's own handlers are there."""
        if threading.current_thread() is not threading.main_thread():
            return  # only there can signals be heard: somebody embeds the server, and tells it to end otherwise
        for number in (signal.SIGTERM, signal.SIGINT):
            self._listen_for(number, asyncio.get_running_loop())

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Refuse what comes from now on. Harmless when repeated; any thread, and a signal handler, may call it."""
        if not self.value:
            self.value = True
            loop.call_soon_threadsafe(loop.call_later, self._timeout_s, self._give_up)

    def _listen_for(self, number: signal.Signals, loop: asyncio.AbstractEventLoop) -> None:
        before = signal.getsignal(number)
        if not callable(before):
            return  # the process ends at once

        def heard(number: int, frame: FrameType | None) -> None:
            self.begin(loop)
            before(number, frame)

        signal.signal(number, heard)
        signal.siginterrupt(number, False)
