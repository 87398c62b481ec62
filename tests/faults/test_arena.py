"""Memory that two processes see, when one of them stands still or both are gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest

from contextcache.names import new_cache_ref
from contextcache.v1 import kv_sidecar_pb2 as pb
from tests.kit.borrower import FILL, SIZE_BYTES, Borrower
from tests.kit.engine_rank import EngineRank
from tests.kit.kv_blocks import BLOCK_TOKENS, TENANT
from tests.kit.ports import free_port
from tests.kit.process_memory import arenas_of
from tests.kit.sidecar_process import SidecarProcess
from tests.kit.until import wait_until

METRICS_PORT = free_port()


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    sidecar = SidecarProcess(
        tmp_path,
        block_tokens=BLOCK_TOKENS,
        memory_limit_bytes=3 * SIZE_BYTES,
        save_deadline_ms=1_000,
        collect_interval_s=0.1,
        metrics_port=METRICS_PORT,
    )
    sidecar.start()
    yield sidecar
    sidecar.kill()


def lent_bytes() -> float:
    with urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith("contextcache_sidecar_lent_bytes "))
    return float(value)


def test_slots_of_an_engine_that_stands_still_are_nobody_elses_until_it_ends(sidecar: SidecarProcess) -> None:
    """Its save is over at the sidecar's deadline; the process may go on, and would write there."""
    cache_ref = new_cache_ref()
    with Borrower(sidecar.address, cache_ref) as stopped, closing(EngineRank(sidecar.address)) as rank:
        stopped.stop()
        over = pb.WaitSealedRequest(tenant=TENANT, cache_ref=cache_ref, timeout_ms=30_000)
        assert rank.client._line.stub.WaitSealed(over, timeout=60).reason == "save_deadline"

        def fill_three_times(first: int) -> None:
            for number in range(first, first + 12):
                rank.save(tuple(range(100 * number, 100 * number + 100)))

        def is_untouched() -> bool:
            assert rank.arena is not None
            return bytes(rank.arena.view(stopped.offset, SIZE_BYTES)) == FILL * SIZE_BYTES

        fill_three_times(0)
        assert is_untouched()
        assert lent_bytes() == SIZE_BYTES

        stopped.kill()
        wait_until(lambda: lent_bytes() == 0, what="the killed engine's slot is free")
        fill_three_times(12)
        assert not is_untouched()


def test_nothing_is_left_of_the_memory_when_sidecar_and_engine_have_been_killed(sidecar: SidecarProcess) -> None:
    """It has no name, and goes with the last process that has it."""
    assert sidecar._process is not None
    inodes = arenas_of(sidecar._process.pid)
    assert len(inodes) == 2  # the memory, and the table of its generations

    def holders() -> int:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return sum(bool(inodes & arenas_of(pid)) for pid in pids)

    with Borrower(sidecar.address, new_cache_ref(), forks=True) as engine:
        assert holders() == 2
        sidecar.kill()
        assert holders() == 1
        engine.kill()
        assert holders() == 0
