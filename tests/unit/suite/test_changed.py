"""`make check` runs the tests of changed code and no others."""

import pytest

from tests.suite.changed import select

TREE = {
    "gateway/flows.py": "",
    "gateway/__init__.py": "",
    "contextcache/errors.py": "",
    "tests/kit/world.py": "from gateway import flows",
    "tests/unit/gateway/test_flows.py": "from gateway.flows import run",
    "tests/unit/gateway/test_world.py": "from tests.kit.world import World",
    "tests/unit/gateway/test_keys.py": "import gateway.keys",
    "tests/unit/errors/conftest.py": "from contextcache.errors import Error",
    "tests/unit/errors/test_each.py": "",
    "vllm_plugin/turn.py": "",
    "tests/unit/vllm_plugin/test_turn.py": "from vllm_plugin.turn import Turn; from contextcache.errors import Error",
    "tests/integration/test_real.py": "from gateway import flows",
}


@pytest.fixture
def root(tmp_path):
    for name, text in TREE.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("gateway/flows.py", ["gateway/test_flows.py", "gateway/test_world.py"]),
        ("tests/kit/world.py", ["gateway/test_world.py"]),
        ("tests/unit/gateway/test_keys.py", ["gateway/test_keys.py"]),
        ("contextcache/errors.py", ["errors/test_each.py"]),
        ("vllm_plugin/turn.py", ["vllm_plugin/test_turn.py"]),
        ("tests/integration/test_real.py", []),
        ("README.md", []),
    ],
)
def test_a_change_runs_the_unit_tests_that_import_it(root, changed, tests):
    assert sorted(select([changed], root)) == [f"tests/unit/{test}" for test in tests]
