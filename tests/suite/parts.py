"""The parts of the suite: what each proves, where its tests are, how it is run. Every test is in exactly one part.

`make test` runs the quick ones, in this order, what says no soonest first; there, tests marked `thorough` are left out.
Those, and whole parts that take minutes, are the thorough ones: `make test-all` runs all, a commit in CI one of them.
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
    """With `make test-all`, and in CI when its turn comes."""


@dataclass(frozen=True, slots=True)
class Part:
    """Tests that are run by one command."""

    name: str
    proves: str
    paths: tuple[str, ...] = ()
    """Files and folders of tests."""
    tier: Tier = Tier.QUICK
    marks: str = ""
    """Which tests there, as pytest's `-m`; without it all."""
    workers: int = 0
    """Processes beside each other, a file of tests in one of them; 0: none but pytest's own, in the files' order."""
    module: str = ""
    """Run this instead of pytest, with `--seed`."""
    arguments: tuple[str, ...] = ()
    beside: bool = False
    """Waits for an engine much of its time: runs beside the quick parts that follow the first, after others like it.

    One at a time: tests wait with deadlines, and a crowd on two cores breaks them."""

    def command(self, seed: int) -> list[str]:
        """Return what runs it."""
        if self.module:
            return [sys.executable, "-m", self.module, *self.arguments, "--seed", str(seed)]
        command = [sys.executable, "-m", "pytest", *self.paths, "-q", *self.arguments]
        command += ["-m", self.marks] if self.marks else []
        # Where a stack is shared, its tests follow each other, so that no idle engine stands by.
        return command + (
            ["-n", str(self.workers), "--dist", "loadfile"] if self.workers else ["--randomly-dont-reorganize"]
        )


QUICK_ONES, THOROUGH_ONES = "not thorough", "thorough"

PARTS = (
    Part(
        "unit",
        "each rule by itself; stores and fakes keep their contracts",
        ("tests/unit", "tests/contract", "benchmarks"),
        marks=QUICK_ONES,
        workers=2,
    ),
    Part(
        "chart",
        "every release renders, is safe, wired and accepted by Kubernetes",
        ("tests/chart",),
        marks=QUICK_ONES,
        workers=2,
    ),
    Part("integration", "real processes on real sockets", ("tests/integration",), marks=QUICK_ONES, workers=3),
    Part("fuzz", "no input hurts a process", ("tests/fuzz",), marks=QUICK_ONES),
    Part(
        "vllm",
        "the main job: contexts, turns, KV that survives and moves",
        ("tests/vllm", "tests/models"),
        marks=QUICK_ONES,
        beside=True,
    ),
    Part(
        "faults",
        "what breaks costs time, never a wrong answer",
        ("tests/faults",),
        marks=QUICK_ONES,
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
        marks=THOROUGH_ONES,
        workers=2,
    ),
    Part(
        "integration-thorough",
        "more faults, fronts and rounds of the same",
        ("tests/integration",),
        Tier.THOROUGH,
        marks=THOROUGH_ONES,
        workers=4,
    ),
    Part("fuzz-thorough", "more of the same inputs", ("tests/fuzz",), Tier.THOROUGH, marks=THOROUGH_ONES),
    Part("mutants", "a promise that is broken is noticed", (), Tier.THOROUGH, module="tests.mutants"),
    Part("chart-processes", "what the chart renders runs", ("tests/chart_processes",), Tier.THOROUGH),
    Part(
        "vllm-thorough",
        "KV on real engines: every edge, other weights, small budgets",
        ("tests/vllm",),
        Tier.THOROUGH,
        marks=THOROUGH_ONES,
    ),
    Part(
        "models",
        "each way in which vLLM lays out KV: what is restored goes on as what was computed",
        ("tests/models",),
        Tier.THOROUGH,
        marks=THOROUGH_ONES,
    ),
    Part(
        "gpu", "KV leaves a GPU and comes back, at real shapes, behind the engine's work", ("tests/gpu",), Tier.THOROUGH
    ),
    Part("faults-thorough", "more faults of each kind", ("tests/faults",), Tier.THOROUGH, marks=THOROUGH_ONES),
    Part("images", "the Dockerfiles build by themselves, and what they make runs", ("tests/images",), Tier.THOROUGH),
    Part("upgrade", "the release before works beside this one", ("tests/upgrade",), Tier.THOROUGH),
    *(
        Part(f"torture-{run}", proves, (), Tier.THOROUGH, module="tests.torture", arguments=("--only", run))
        for run, proves in {
            "conversations": "hundreds of turns, each compared with the cold answer, whatever happens between",
            "tenants": "tenants that attack each other get nothing",
            "races": "racing clients and dying processes leave sessions whole",
            "orphans": "bytes that nobody names are freed, and only those",
            "redis": "managers that die between every two steps of a script",
            "matrix": "every fault at every step",
        }.items()
    ),
)
