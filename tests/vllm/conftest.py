"""One real stack for the end-to-end tests: SmolLM2 in float32 behind both fronts; a second engine for moves."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.kit.caller import Caller
from tests.kit.kept_kv import forgotten
from tests.kit.stack import KEEPING_KEY, OTHER_KEY, Stack
from tests.kit.until import wait_until

TOMBSTONE_S = 15
IDLE = "engine-1"
"""Gets no work but where contexts move to it (test_moving.py)."""
_THREADS = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
"""Both cores: the engines take turns."""
both_fronts = pytest.mark.parametrize("front", ["envoy", "http"], indirect=True)
"""For what a front could spoil. The others go through Envoy, as production does."""
http_front_too = pytest.mark.parametrize(
    "front", ["envoy", pytest.param("http", marks=pytest.mark.thorough)], indirect=True
)
"""For what is code below both fronts, or tests/integration/fronts has on both: the second one in the longer run."""


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack; parts a test kills are started again. The second engine starts if a chosen test needs it."""
    needs_two = any("pair" in getattr(item, "fixturenames", ()) for item in request.session.items)
    running = Stack(
        tmp_path_factory.mktemp("stack"),
        engines=1 + needs_two,
        patient=True,
        # A prefill of more than one chunk well below 2 500 tokens; TTLs and passes short enough to be waited for.
        # Agents offer tools with each request.
        engine_args=["--max-num-batched-tokens", "1024", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
        env={
            "MANAGER_MIN_TTL_S": "1",
            "MANAGER_TOMBSTONE_S": str(TOMBSTONE_S),
            "MANAGER_SWEEP_INTERVAL_S": "0.5",
            "SIDECAR_COLLECT_INTERVAL_S": "0.5",
        },
        part_env=dict.fromkeys(["engine", IDLE][: 1 + needs_two], _THREADS),
    )
    try:
        with running:
            if needs_two:
                running.drain(IDLE)
            yield running
    finally:
        running.clean()


@pytest.fixture
def front(request: pytest.FixtureRequest) -> str:
    """Which front the callers use."""
    return getattr(request, "param", "envoy")


@pytest.fixture
def client(stack: Stack, front: str) -> Iterator[Caller]:
    """A caller of tenant `demo`; the stack is whole before and after."""
    stack.mend()
    caller = Caller(stack, front=front)
    yield caller
    caller.close()
    stack.mend()


@pytest.fixture
def other(stack: Stack, front: str) -> Iterator[Caller]:
    """A caller of tenant `other`."""
    caller = Caller(stack, OTHER_KEY, front=front)
    yield caller
    caller.close()


@pytest.fixture
def stored(stack: Stack):
    """Return the bytes of block and tail files on the sidecars' disks."""
    return stack.stored_bytes


@pytest.fixture
def keeper(stack: Stack) -> Iterator[Caller]:
    """A caller whose plain requests are kept; nothing is left of it."""
    stack.mend()
    caller = Caller(stack, KEEPING_KEY)
    yield caller
    stack.mend()
    wait_until(lambda: forgotten(stack, caller), what="nothing is kept any more")
    caller.delete_all()
    caller.close()
