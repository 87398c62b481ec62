"""A pod whose turns run over a real manager and a toy engine. A file may override either."""

import pytest

from tests.kit.fake_vllm import FakeVllm
from tests.kit.turn_bench import Pod


@pytest.fixture
def engine():
    return FakeVllm()


@pytest.fixture
def pod(tmp_path, engine):
    return Pod(tmp_path, engine)
