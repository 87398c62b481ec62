"""Requests of vLLM's MultiConnector over ours and ExampleConnector, in both orders, beside ExampleConnector alone.

Three engines with SmolLM2 and one sidecar process. Each round asks all of them for one prompt, in turned order:

- cold: no connector has tokens of it;
- hit: the other connector has it, and the request has no order for ours;
- context: both have it, and the request has an order to load;
- ours failed: the same, after SIGKILL of the sidecar; these rounds come last.

The engine's prefix cache is emptied before each request. Answers must be those of the other connector alone. A time is
compared with that of the other connector alone in the same round.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from contextcache.names import new_cache_ref
from deploy.local.model import MODEL_DIR, prepare_model
from deploy.local.progress import Step
from kv_sidecar.client import EngineSidecarClient
from tests.kit.several_connectors import ORDERS, second_alone, several
from tests.kit.sidecar_process import SidecarProcess, fault
from tests.kit.tiny_engine import Start, TinyEngine
from tests.kit.until import wait_until
from tests.torture.report import Options, Report

ROUNDS = 10
"""Of each phase by default (`--turns 500`), after one that is not counted."""
PROMPT_TOKENS = 1200
ALONE = "alone"
KINDS = ("cold", "hit", "context", "ours failed")


def run(options: Options) -> Report:
    """Run both phases."""
    report = Report("connectors")
    prepare_model()
    with tempfile.TemporaryDirectory(prefix="connectors-") as directory, ExitStack() as stack:
        world = World(Path(directory), stack, report, options.random("connectors"))
        for failed in (False, True):
            for number in range(max(ROUNDS * options.turns // 500, 1) + 1):
                with Step(f"round {number}{', ours failed' if failed else ''}"):
                    world.round(number, failed=failed)
            world.sidecar.kill()
    heads = ["request", "connectors", "n", "cached tokens", "alone, ms", "ms", "ratio", "quartiles of it"]
    rows = [world.row(kind, order) for kind in KINDS for order in ORDERS]
    report.tables["Beside the other connector alone"] = (heads, rows)
    return report


class World:
    """Three engines, one sidecar, and prompts never seen before."""

    def __init__(self, folder: Path, stack: ExitStack, report: Report, rng: Random) -> None:
        self.sidecar = SidecarProcess(folder, memory_limit_bytes=1 << 30)
        self.sidecar.start()
        stack.callback(self.sidecar.kill)
        self._client = EngineSidecarClient(self.sidecar.address, timeout_s=5)
        stack.callback(self._client.close)
        self._report, self._rng = report, rng
        self._engines: dict[str, TinyEngine] = {}
        self._took_ms: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._cached: dict[tuple[str, str], int] = {}
        for name in (ALONE, *ORDERS):
            others, secret = folder / name, folder / f"{name}.secret"
            transfer = second_alone(others) if name == ALONE else several(name, self.sidecar.address, secret, others)
            arguments = {"disable_hybrid_kv_cache_manager": True, "max_model_len": 4096, "dtype": "bfloat16"}
            with Step(f"engine: {name}"):
                start = Start(str(MODEL_DIR), engine_args=arguments, kv_transfer=transfer)
                self._engines[name] = stack.enter_context(TinyEngine(start))

    def round(self, number: int, *, failed: bool) -> None:
        """Ask for one prompt in all ways; round 0 is not counted."""
        prompt = self._rng.choices(range(1000, 40_000), k=PROMPT_TOKENS)
        cache_refs = {order: new_cache_ref() for order in ORDERS}
        orders: dict[str, dict[str, Any]] = {name: {"load": (cache_ref,)} for name, cache_ref in cache_refs.items()}
        names = [(ALONE, *ORDERS)[(number + place) % 3] for place in range(3)]
        kinds = ("cold", "ours failed") if failed else ("cold", "hit", "context")
        for kind in kinds:
            if kind == "context":
                for name, cache_ref in cache_refs.items():
                    self._asked(name, prompt, save=cache_ref)
                    wait_until(partial(self._durable, cache_ref), what="the KV is durable")
            answers = {}
            for name in names:
                more = orders.get(name, {}) if kind in ("context", "ours failed") else {}
                took_ms, answers[name] = self._asked(name, prompt, **more)
                self._cached[kind, name] = answers[name]["cached_tokens"]
                if number and not (failed and kind == "cold"):
                    self._took_ms[kind, name].append(took_ms)
            for name in ORDERS:
                self._report.count("answers compared")
                if answers[name]["token_ids"] != answers[ALONE]["token_ids"]:
                    self._report.failures.append(f"{kind}, {name}: another answer than of the other connector alone")

    def row(self, kind: str, order: str) -> list[str]:
        """Return a row of the table."""
        some_ms, alone_ms = self._took_ms[kind, order], self._took_ms[kind, ALONE]
        ratios = [one / other for one, other in zip(some_ms, alone_ms, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        times = [f"{statistics.median(times):.0f}" for times in (alone_ms, some_ms)]
        cached = f"{self._cached[kind, ALONE]}, {self._cached[kind, order]}"
        ratio = [f"{statistics.median(ratios):.2f}", f"{low:.2f} to {high:.2f}"]
        return [kind, order, str(len(ratios)), cached, *times, *ratio]

    def _durable(self, cache_ref: str) -> bool:
        return fault(lambda: self._client.get_manifest("demo", cache_ref, 1)) is None

    def _asked(self, name: str, prompt: list[int], **more: Any) -> tuple[float, dict[str, Any]]:
        """Return ms and answer."""
        engine = self._engines[name]
        engine.order("forget", connector=False)
        began_s = time.perf_counter()
        answer = engine.ask(prompt, num_tokens=2, **more)
        return (time.perf_counter() - began_s) * 1000, answer
