"""The workflows run every part of the suite, by targets that the Makefile has."""

import re
from pathlib import Path

import yaml

from tests.suite.__main__ import SHARDS_A_JOB, matrix
from tests.suite.parts import PARTS, Tier

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = {file.stem: file.read_text() for file in (ROOT / ".github" / "workflows").glob("*.yml")}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def jobs(name):
    return yaml.safe_load(WORKFLOWS[name])["jobs"]


def test_a_pull_request_runs_every_quick_part_once():
    included = jobs("ci")["quick"]["strategy"]["matrix"]["include"]
    named = [part for job in included for part in job["parts"].split()]

    assert sorted(named) == sorted(part.name for part in PARTS if part.tier is Tier.QUICK)


def test_a_night_runs_every_shard_of_every_thorough_part():
    assert "make --silent test-matrix)" in WORKFLOWS["nightly"]
    assert jobs("nightly")["thorough"]["strategy"]["matrix"] == "${{ fromJSON(needs.parts.outputs.matrix) }}"
    for part in (part for part in PARTS if part.tier is Tier.THOROUGH):
        shards = [job["shard"] for job in matrix() if job["part"] == part.name]
        assert shards == [f"{number}/{len(shards)}" for number in range(len(shards))]
        assert (len(shards) - 1) * SHARDS_A_JOB < part.shards <= len(shards) * SHARDS_A_JOB


def test_a_pull_request_runs_the_thorough_parts_that_its_paths_concern(monkeypatch):
    def parts(*changed):
        monkeypatch.setattr("tests.suite.__main__._git", lambda *_words: "\n".join(changed))
        return {job["part"] for job in matrix("main")}

    assert parts("kv_sidecar/catalog.py") >= {"faults-thorough", "vllm-thorough"}
    assert "chart-processes" in parts("charts/context-cache/values.yaml")
    assert parts("docs/index.md") == set()


def test_each_path_that_a_part_watches_is_there():
    assert [path for part in PARTS for path in part.watches if not list(ROOT.glob(f"{path.rstrip('/')}*"))] == []


def test_workflows_and_ci_call_targets_that_the_makefile_has():
    texts = [*WORKFLOWS.values(), (ROOT / ".ci" / "run").read_text()]
    called = {
        word for text in texts for line in re.findall(r"make (?:--silent )?([a-z- ]+)", text) for word in line.split()
    }
    named = {
        target for job in jobs("ci")["quick"]["strategy"]["matrix"]["include"] for target in job["targets"].split()
    }

    assert named <= TARGETS
    assert {"test-all", "test-matrix", "lint", "test", "test-slice"} <= called & TARGETS
