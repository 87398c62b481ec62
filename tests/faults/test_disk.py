"""A slow disk, and clocks that are wrong: the answers stay right and in time. Full disks are in the torture run."""

from __future__ import annotations

import pytest

from tests.kit.faults.cases import clock_case, slow_disk_case
from tests.kit.faults.world import describe

pytestmark = pytest.mark.timeout(600)


@pytest.mark.thorough
def test_a_slow_disk_slows_the_saver_and_never_the_turn(world):
    """Seen failing with the sidecar's writes on its event loop (tiers/store.py): no KV was read beside them."""
    row = slow_disk_case(
        world, lambda: world.orders.slow_disk("kv_sidecar", write_ms=500, fsync_ms=3000), world.orders.heal
    )

    print(describe([row]))
    assert row.faults == []


@pytest.mark.parametrize(
    ("module", "shift_s"),
    [
        ("kv_sidecar", 3700),
        pytest.param("kv_sidecar", -3700, marks=pytest.mark.thorough),
        pytest.param("context_manager", 3700, marks=pytest.mark.thorough),
    ],
)
def test_a_clock_that_is_wrong_makes_no_answer_wrong(world, module, shift_s):
    """The context has an hour to live. A sidecar an hour ahead drops its KV: it is computed again.

    Seen failing with expiry not looked at in the sidecar (expired KV used), and with the manager's own clock in the
    place of Redis's (ADR 0021).
    """
    row = clock_case(world, module, shift_s * 1000, world.orders.shift_clock)

    print(describe([row]))
    assert row.faults == []
    if (module, shift_s) == ("kv_sidecar", 3700):
        assert row.outcome.startswith("cold"), "KV that has expired was used"
