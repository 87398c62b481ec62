"""One tenant sends twenty bodies built to be slow to read, 32 MiB each: nobody else notices. Times: `benchmarks/`."""

import pytest

from tests.kit.hostile_bodies import NUM_BODIES, SIZE_BYTES, running_world


@pytest.mark.timeout(240)
@pytest.mark.parametrize("front_kind", ["envoy", pytest.param("http", marks=pytest.mark.thorough)], indirect=True)
async def test_bodies_built_to_be_slow_open_no_door_and_stop_nobody(front_kind):
    """Seen to fail before bodies were read without being built: through Envoy 2 keyless requests reached the pod."""
    async with running_world(front_kind) as world:
        seen = await world.attack()

    assert set(seen.statuses["keyless"]) == {401}
    assert set(seen.statuses["keyed"]) == {200}
    assert "keyless" not in seen.reached_pod
    assert seen.hostile.total() == NUM_BODIES
    # 0: the connection was closed in the middle of a body that is refused.
    assert seen.hostile.keys() <= {0, 400, 404, 429}, seen.hostile
    assert seen.grown_bytes < 2 * NUM_BODIES * SIZE_BYTES
