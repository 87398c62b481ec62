"""One stack for every fuzz test: what an input has left behind must not hurt the next one."""

from __future__ import annotations

import pytest

from tests.fuzz.stack import fuzz_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory):
    with fuzz_stack(tmp_path_factory.mktemp("fuzz")) as running:
        yield running
