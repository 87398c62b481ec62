"""A sidecar on a clock that a test moves, and pods over one shared store. A file may override `kv_settings`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from contextcache.clock import ManualClock
from tests.kit.kv_blocks import FINGERPRINT, SidecarUnderTest
from tests.kit.store_keys import write_store_keys


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def kv_settings() -> dict[str, object]:
    return {}


@pytest.fixture
async def kv(tmp_path: Path, clock: ManualClock, kv_settings: dict[str, object]) -> AsyncIterator[SidecarUnderTest]:
    async with SidecarUnderTest(tmp_path, clock=clock, **kv_settings) as kv:
        yield kv


@pytest.fixture
def pod(tmp_path: Path, clock: ManualClock, kv_settings: dict[str, object]) -> Callable[..., Any]:
    """Return a function that runs a sidecar with a disk of its own over the one store, with these keys by tenant."""
    # The store has the machine's clock.
    clock.advance(ms=round(time.time() * 1000) - clock.now_ms())

    @asynccontextmanager
    async def running(
        name: str, keys: Mapping[str, Sequence[str]] | None = None, **more: object
    ) -> AsyncIterator[SidecarUnderTest]:
        given = {"store_url": f"file://{tmp_path}/store", **kv_settings, **more}
        keys = given.pop("keys", keys)
        if keys is not None:
            given["store_keys_file"] = write_store_keys(tmp_path / f"{name}.keys", keys)
        async with SidecarUnderTest(tmp_path / name, clock=clock, **given) as kv:
            kv.sidecar.engine.introduce(0, 1, FINGERPRINT, "")
            yield kv

    return running
