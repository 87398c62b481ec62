"""`python -m tests.mutants`: what it finds, and that its lists fit the tree."""

import subprocess
from pathlib import Path

import pytest

import tests.mutants.__main__ as runner
from tests.mutants.mutant import read_mutants

ROOT = Path(__file__).parents[3]
TREE = {
    "limits.py": "MAX = 3\n\n\ndef is_too_many(number):\n    return number > MAX\n",
    "test_limits.py": "from limits import is_too_many\n\n\ndef test_four_are_too_many():\n    assert is_too_many(4)\n",
    "pyproject.toml": "[tool.pytest.ini_options]\n",
}
MUTANTS = {
    "dies": ("return number > MAX", "return number < MAX"),
    "lives": ("return number > MAX", "return number >= MAX"),
    "stale": ("return number == MAX", "return True"),
}
CONTRACTS = [ROOT / f"tests/contract/session_{name}_contract.py" for name in ("store", "changes")]
INHERITING = "tests/contract/test_redis_session_store.py"
"""File whose tests stand there, or in itself."""


@pytest.mark.thorough
def test_a_mutant_that_lives_or_is_stale_is_a_finding_and_the_tree_stays_as_it_is(tmp_path, capsys):
    root = tmp_path / "tree"
    root.mkdir()
    for name, text in TREE.items():
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", root], check=True)
    entries = (
        f'[{name}]\nfile = "limits.py"\nold = "{old}"\nnew = "{new}"\ntests = ["test_limits.py"]\nwhy = "too many"\n'
        for name, (old, new) in MUTANTS.items()
    )
    (tmp_path / "some.toml").write_text("\n".join(entries))

    status = runner.main(["--root", str(root), "--lists", str(tmp_path)])

    said = {line.split()[0]: line.split(" s  ")[-1] for line in capsys.readouterr().out.splitlines()}
    assert status == 1
    assert said["dies"] == "limits.py: killed by test_limits.py::test_four_are_too_many"
    assert said["lives"] == "limits.py: LIVED"
    assert said["stale"] == "limits.py: STALE: the text stands there 0 times"
    assert said["-"] == "nothing changed: 1 tests pass"
    assert {name: (root / name).read_text() for name in TREE} == TREE


def test_each_listed_mutant_fits_the_tree():
    for mutant in read_mutants(ROOT / "tests/mutants"):
        assert mutant.copies(ROOT) == 1, mutant.name
        assert mutant.old != mutant.new, mutant.name
        for test in mutant.tests:
            file, _, function = test.partition("::")
            places = [ROOT / file, *(CONTRACTS if file == INHERITING else ())]
            named = f"def {function.split('::')[-1]}("
            assert any(named in place.read_text() for place in places), f"{mutant.name}: {test}"
