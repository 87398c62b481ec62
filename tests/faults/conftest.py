"""One stack for those fault tests that leave it whole: it takes longest to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.stack import FaultStack


@pytest.fixture(scope="session")
def _stack_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultStack]:
    # A memory tier of 1 000 tokens, so that what is restored comes from there and from disk.
    memory = {"SIDECAR_MEMORY_LIMIT_BYTES": str(1 << 20)}
    with FaultStack(tmp_path_factory.mktemp("whole"), patient=True, env=memory) as stack:
        yield stack


@pytest.fixture
def whole_stack(_stack_of_the_session: FaultStack) -> Iterator[FaultStack]:
    """A stack of one engine, with the patience of a busy machine; whole before and after."""
    _stack_of_the_session.mend()
    yield _stack_of_the_session
    _stack_of_the_session.mend()
