"""Processes killed in mid-turn and at named points: nothing acknowledged is lost, and nothing hangs.

One stack, whose engine stays up while gateway, manager and sidecar come and go. Killing the engine, and every
point of every package, is in `make torture`.

Seen failing with a commit acknowledged that got no answer, twice (`Settlement._commit_twice`): at
`manager.commit.before`, and with the manager killed in mid-turn. What dies in the sidecar costs KV and no turn: whose
guards those are is said in test_exact_bytes.py.
"""

from __future__ import annotations

import pytest

from tests.kit.faults.cases import POINTS, kill_mid_turn_case, point_case
from tests.kit.faults.world import describe

pytestmark = pytest.mark.timeout(600)

thorough = pytest.mark.thorough
FEW = [
    "sidecar.manifest.write",
    "manager.commit.before",
    pytest.param("sidecar.block.rename", marks=thorough),
    pytest.param("sidecar.manifest.published", marks=thorough),
    pytest.param("manager.commit.after", marks=thorough),
]
"""Publish and commit; the others are in the torture run."""


@pytest.mark.parametrize("point", FEW)
def test_a_part_that_dies_at_a_point_costs_time_and_never_a_turn(world, point):
    row = point_case(world, point)

    print(describe([row]))
    assert point in POINTS
    assert row.was_passed, "the conversation did not come by: the case proved nothing"
    assert row.faults == []


PARTS = ["sidecar", *(pytest.param(part, marks=thorough) for part in ("turn", "gateway", "manager"))]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_killed_in_the_middle_of_a_turn_loses_nothing_acknowledged(world, part):
    row = kill_mid_turn_case(world, part)

    print(f"{describe([row])} recovered in {row.recovery_s:.1f} s")
    assert row.faults == []
