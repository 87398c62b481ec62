"""Requests stay easy to follow: their path through the code returns to `flows.py` a few times only."""

import pytest

from tests.kit.walk import CREATE, PATCH, TURN, walks

FLOWS = "gateway/flows.py"


@pytest.fixture
async def walked(tmp_path):
    return await walks(tmp_path)


async def test_a_request_returns_to_the_flows_a_few_times_only(walked):
    """Seen failing with the flows of 0.1.0: a create returned 9 times, a turn 11 times, a PATCH once."""
    returns = {name: walk.returns_to(FLOWS) for name, walk in walked.items()}

    assert returns[CREATE] <= 4
    assert returns[TURN] <= 5
    assert returns[PATCH] == 0
    assert all(len(walk.steps) > 50 for walk in walked.values())
