"""The benchmark of the data path runs: its engine is made of words, and the connector may ask for new ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_transfer import SHAPES, Rank

pytestmark = pytest.mark.timeout(120)


def test_a_rank_over_random_pages_starts_without_a_sidecar():
    """`bench_scale` and `bench_store` stand on it too. Seen failing without `max_model_len`, as it was for a day."""
    rank = Rank("unix:///nowhere", SHAPES["smollm2"], 64)
    rank.side.shutdown()

    assert rank.facts.world_size == 1


@pytest.mark.thorough
def test_a_small_context_goes_all_the_ways_that_are_measured(tmp_path):
    out = tmp_path / "result.json"
    asked = ("--shape", "smollm2", "--tokens", "64", "--rounds", "1", "--out", str(out))
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_transfer", *asked],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    measured = {row["what"]: row["gb_s"] for row in json.loads(out.read_text())["rows"]} if out.exists() else {}

    assert {"memcpy", "save, until sealed", "load from memory", "load from disk, warm"} <= set(measured), told.stderr
    assert min(measured.values()) > 0
