"""The parts of the suite: what each proves, where its tests are, how it is run. Every test is in exactly one part.

`make test` runs the quick parts in this order and leaves out tests marked `thorough`. The thorough parts hold those
tests and whole folders that take minutes: the nightly workflow runs all of them, each run of CI one shard.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum


class Tier(StrEnum):
    """When a part runs."""

    QUICK = "quick"
    """With `make test`."""
    THOROUGH = "thorough"
    """With `make test-all` and every night; CI runs one shard of it when its turn comes."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tests that one command runs."""

    name: str
    proves: str
    paths: tuple[str, ...] = ()
    """Files and folders of tests."""
    tier: Tier = Tier.QUICK
    marks: str = ""
    """pytest's `-m`; empty: all tests."""
    but: tuple[str, ...] = ()
    """Files and folders inside `paths` that belong to another part."""
    workers: int = 0
    """Number of pytest-xdist workers, each with whole files; 0: one process, files in their order."""
    module: str = ""
    """Python module that runs in pytest's place, with `--seed`."""
    arguments: tuple[str, ...] = ()
    in_slice: tuple[str, ...] = ()
    """Further arguments of a module in CI's slice, where it does less of the same."""
    beside: bool = False
    """Runs in the second lane, beside the quick parts after the first: one process, or an engine that waits.

    One part at a time: tests wait with deadlines, and a crowd on two cores breaks them."""
    budget_cpu_s: int = 0
    """CPU seconds above which the part fails, a quarter above its use; 0: none. The runner scales it to the machine."""
    shards: int = 1
    """Number of shards, so that each ends within CI's four minutes."""
    watches: tuple[str, ...] = ()
    """Beginnings of paths: a pull request that changes such a file runs this thorough part."""

    def command(self, seed: int, *, shard: tuple[int, int] | None = None, stop_at: float | None = None) -> list[str]:
        """Return the command line of the part, or of shard `(number, count)`."""
        piece = ["--shard", f"{shard[0]}/{shard[1]}"] if shard and shard[1] > 1 else []
        if self.module:
            less = self.in_slice if stop_at else ()
            return [sys.executable, "-m", self.module, *self.arguments, *less, *piece, "--seed", str(seed)]
        command = [sys.executable, "-m", "pytest", "-p", "tests.suite.plugin", *self.paths, "-q", *self.arguments]
        command += [f"--durations={NUM_SLOWEST}", "--durations-min=1", *(f"--ignore={path}" for path in self.but)]
        command += ["-m", self.marks] if self.marks else []
        command += [*piece, *(["--stop-at", str(stop_at)] if stop_at else [])]
        # In one process, tests that share a stack follow each other, so that no idle engine stands by.
        return command + (
            ["-n", str(self.workers), "--dist", "loadfile"] if self.workers else ["--randomly-dont-reorganize"]
        )


NUM_SLOWEST = 15
QUICK_ONES, THOROUGH_ONES = "not thorough", "thorough"

_ENGINE_UNIT = ("tests/unit/vllm_plugin", "tests/unit/torture", "benchmarks")
"""Unit tests that import vLLM or torch, which costs a process many CPU seconds."""
_CHART = ("charts/", "deploy/chart/", "tests/chart")
_KV = ("kv_sidecar/", "vllm_plugin/", "integrations/", "tests/faults/", "tests/vllm/", "tests/models/")
_REDIS = ("context_manager/", "gateway/", "tests/integration/")
_FORMATS = ("proto/", "kv_sidecar/format/", "context_manager/scripts/", "tests/upgrade/")
_IMAGES = ("deploy/docker/", "pyproject.toml")
_TORTURE_IN_SLICE = ("--turns", "100", "--minutes", "2")

PARTS = (
    Part(
        "unit",
        "each rule by itself; stores and fakes keep their contracts",
        ("tests/unit", "tests/contract"),
        marks=QUICK_ONES,
        budget_cpu_s=250,
        but=_ENGINE_UNIT[:2],
        workers=2,
    ),
    Part(
        "unit-engine",
        "each rule of the connector and of a turn by itself; codecs and copies are right",
        _ENGINE_UNIT,
        marks=QUICK_ONES,
        budget_cpu_s=165,
        workers=1,
        beside=True,
    ),
    Part(
        "chart",
        "every release renders, is safe, wired and accepted by Kubernetes",
        ("tests/chart",),
        marks=QUICK_ONES,
        budget_cpu_s=105,
        workers=2,
    ),
    Part(
        "integration",
        "real processes on real sockets",
        ("tests/integration",),
        marks=QUICK_ONES,
        budget_cpu_s=550,
        workers=3,
    ),
    Part("fuzz", "no input hurts a process", ("tests/fuzz",), marks=QUICK_ONES, budget_cpu_s=46),
    Part(
        "vllm",
        "the main job: contexts, turns, KV that survives and moves",
        ("tests/vllm",),
        marks=QUICK_ONES,
        budget_cpu_s=330,
        beside=True,
    ),
    Part(
        "faults",
        "a fault costs time, never a wrong answer",
        ("tests/faults",),
        marks=QUICK_ONES,
        budget_cpu_s=165,
        beside=True,
    ),
    Part(
        "unit-thorough",
        "ten thousand sessions end by Redis' own clock; loading the connector starts nothing",
        ("tests/unit", "tests/contract", "benchmarks"),
        Tier.THOROUGH,
        marks=THOROUGH_ONES,
    ),
    Part(
        "chart-thorough",
        "every value has an effect, every wrong one is refused, both Helms agree",
        ("tests/chart",),
        Tier.THOROUGH,
        watches=_CHART,
        marks=THOROUGH_ONES,
        workers=2,
        shards=4,
    ),
    Part(
        "integration-thorough",
        "more faults, fronts and rounds of the same",
        ("tests/integration",),
        Tier.THOROUGH,
        watches=_REDIS,
        marks=THOROUGH_ONES,
        workers=4,
        shards=6,
    ),
    Part("fuzz-thorough", "more of the same inputs", ("tests/fuzz",), Tier.THOROUGH, marks=THOROUGH_ONES),
    Part("mutants", "a promise that is broken is noticed", (), Tier.THOROUGH, module="tests.mutants", shards=6),
    Part(
        "chart-processes",
        "the rendered chart runs",
        ("tests/chart_processes",),
        Tier.THOROUGH,
        watches=_CHART,
        shards=3,
    ),
    Part(
        "vllm-thorough",
        "KV on real engines: every edge, other weights, small budgets",
        ("tests/vllm",),
        Tier.THOROUGH,
        watches=_KV,
        marks=THOROUGH_ONES,
        shards=18,
    ),
    Part(
        "models",
        "each KV layout of vLLM: a restored context continues as the computed one",
        ("tests/models",),
        Tier.THOROUGH,
        watches=_KV,
        shards=8,
    ),
    Part(
        "gpu", "KV leaves a GPU and comes back, at real shapes, behind the engine's work", ("tests/gpu",), Tier.THOROUGH
    ),
    Part(
        "faults-thorough",
        "more faults of each kind",
        ("tests/faults",),
        Tier.THOROUGH,
        watches=_KV,
        marks=THOROUGH_ONES,
        shards=8,
    ),
    Part(
        "images",
        "the Dockerfiles build by themselves, and their images run",
        ("tests/images",),
        Tier.THOROUGH,
        watches=_IMAGES,
        shards=2,
    ),
    Part(
        "upgrade",
        "the release before works beside this one",
        ("tests/upgrade",),
        Tier.THOROUGH,
        watches=_FORMATS,
        shards=2,
    ),
    *(
        Part(
            f"torture-{run}",
            proves,
            (),
            Tier.THOROUGH,
            module="tests.torture",
            arguments=("--only", run),
            in_slice=_TORTURE_IN_SLICE,
        )
        for run, proves in {
            "conversations": "hundreds of turns, each compared with the cold answer, whatever happens between",
            "tenants": "tenants that attack each other get nothing",
            "races": "racing clients and dying processes leave sessions whole",
            "orphans": "unnamed bytes are freed, and only those",
            "matrix": "every fault at every step",
        }.items()
    ),
)
