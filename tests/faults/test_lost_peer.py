"""A peer that is gone without a word, its connection acknowledged by something in between: noticed, and found again."""

from __future__ import annotations

import time

import pytest

from kv_sidecar.client import EngineSidecarClient
from tests.kit.faults.proxy import Proxy
from tests.kit.sidecar_process import SidecarProcess, fault

NOTICED_S = 60
"""It takes 17 s: a ping every 12 s, 5 s for its answer. The rest is for a machine that stalls."""


@pytest.mark.thorough
@pytest.mark.timeout(180)
def test_a_connection_that_has_gone_silent_for_ever_is_given_up_and_made_anew(tmp_path):
    """Seen failing with gRPC's own ping timeout and no pings between calls: every call failed for 120 s."""
    sidecar = SidecarProcess(tmp_path, memory_limit_bytes=0)
    sidecar.start()
    proxy = Proxy(sidecar.address, listen=f"unix://{tmp_path}/proxy.sock")
    client = EngineSidecarClient(proxy.start(), timeout_s=1)

    def code() -> str:
        error = fault(lambda: client.get_manifest("demo", "ref_" + "0" * 32, 1))
        return "" if error is None else error.code

    try:
        assert code() == "cache_ref_not_found"
        proxy.lose()
        began_s = time.monotonic()
        while (seen := code()) == "sidecar_unavailable" and time.monotonic() - began_s < NOTICED_S:
            time.sleep(0.2)
        noticed_s = time.monotonic() - began_s
        print(f"noticed and connected again after {noticed_s:.1f} s")

        assert seen == "cache_ref_not_found"
        assert proxy.num_connections == 2
    finally:
        client.close()
        proxy.close()
        sidecar.kill()
