"""Waits of an engine that has nothing to compute: spinning processes would take the cores that its next prompt needs.

On a CPU, vLLM's processes wait for each other by yielding in a loop until a second after the last message (vLLM 0.32
distributed/device_communicators/shm_broadcast.py `SpinCondition`). A step without work costs two such messages. While
KV is looked up or loaded there are some 600 such steps a second. `sleep_soon` ends the spinning after
4 ms. `IdleEngine` holds such a step until there is news, where no other request is held up.

Figures and alternatives: ADR 0124.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, wait
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from vllm_plugin.connector.loads.lookup import Lookup

_SPIN_S = 0.004
"""A sleeper may miss a message within 3 million ticks of the last one, 1 to 3 ms: zmq's sender looks no more often
whether there is room again. That long is spun."""
_IDLE_WAIT_S = 0.004
"""Wait of a step without work. A new request waits no longer than this for its own."""
_MATCH_WAIT_S = 0.01
"""Wait for a look-up, from its request's arrival: an answer within it saves a step without work."""
_IDLE_STEPS = 2
"""Steps without work after which the engine is taken to have nothing to compute."""


def sleep_soon(device: str) -> None:
    """Have vLLM's processes on a CPU sleep while they wait for each other."""
    if device == "cpu":
        # The instances are older than this connector; a property of the class goes before their own attribute.
        SpinCondition.busy_loop_s = property(lambda _reader: _SPIN_S, lambda _reader, _second: None)


def is_alone(vllm_config: Any) -> bool:
    """Return whether a step that computes nothing holds up no other: none is ordered behind it, no other rank waits.

    vLLM 0.32: `max_concurrent_batches` (async scheduling), `DPEngineCoreProc.run_busy_loop` (experts in parallel).
    """
    return bool(vllm_config.max_concurrent_batches == 1 and vllm_config.parallel_config.data_parallel_size == 1)


class IdleEngine:
    """Used by the engine's thread only."""

    def __init__(self, *, may_wait: bool) -> None:
        """`may_wait`: see `is_alone`."""
        self.may_wait = may_wait
        self.ready: set[str] = set()
        """Requests of all kinds that wait for no answer of ours, or were given blocks; until they finish."""
        self._num_steps = 0

    def wait_for(self, lookup: Lookup, asked_at_s: float) -> None:
        """Give a look-up a moment if the engine has nothing else to do."""
        wait_s = asked_at_s + _MATCH_WAIT_S - time.monotonic()
        if wait_s > 0 and self.may_wait and not self.ready and not lookup.future.done():
            wait([lookup.future], wait_s)

    def step(self, *, has_work: bool) -> None:
        """Count a step."""
        self._num_steps = 0 if has_work else self._num_steps + 1

    def wait_s(self, lookups: Iterable[Lookup | None], *, is_loading: bool) -> float:
        """Return how long the workers may wait in this step for the end of a load; look-ups are waited for here.

        0 while anything is, or may be, computed.
        """
        if not self.may_wait or self._num_steps <= _IDLE_STEPS:
            return 0.0
        if is_loading:
            return _IDLE_WAIT_S
        asked = [lookup.future for lookup in lookups if lookup is not None and not lookup.future.done()]
        wait(asked, _IDLE_WAIT_S, FIRST_COMPLETED)
        return 0.0
