"""Threads that let others go first: they work for what nobody waits for, beside an engine that somebody does wait for.

A file of its own because the engine's connector and the sidecar both have such threads, and nothing else in common.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

NICENESS = 10
"""About a tenth of a core against a thread that wants all of it; all of it against nobody (sched(7))."""


class BackgroundThreads(ThreadPoolExecutor):
    """A pool whose threads step back where the system lets them: by Linux's niceness, which is each thread's own."""

    def __init__(self, max_workers: int, *, thread_name_prefix: str) -> None:
        super().__init__(max_workers, thread_name_prefix, initializer=_step_back)


def _step_back() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
