"""All figures of a GPU in ten minutes, without a hand: `python -m tests.gpu.measure --model <directory> --out <file>`.

1. The tests of the copies, on the GPU.
2. One large copy each way: the link. GB/s of saves and loads by chunk size and number, in both layouts; digests;
   the time in which a load has no interpreter lock.
3. First tokens of our connector and of vLLM's own offloading, cold, hit and restored; with `q4`; decoding beside loads.

It prints the bars and writes the JSON that docs/gpu.md is made of. `--dry-run` goes the same way on a CPU, over the
twin of a driver and a tiny model, to show that the script runs. Its figures mean nothing and no bar is judged.
"""

from __future__ import annotations

import argparse
import json
import mmap
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contextcache.names import new_cache_ref
from tests.kit.host_driver import HostDriver
from tests.kit.paged_kv import ORDERS, Owner, register
from tests.kit.sidecar_process import SidecarProcess
from tests.kit.tiny_engine import SECRET, Start, TinyEngine
from tests.kit.tiny_model import make_tiny_model
from vllm_plugin.connector.copies.cuda_copies import DeviceLayers
from vllm_plugin.connector.copies.digest import page_digests
from vllm_plugin.connector.copies.layout import layer_views, open_layers
from vllm_plugin.connector.copies.pages import PageCopy, Spent, page_bytes

LAYERS, HEADS, BLOCK_TOKENS, CONTENT_BYTES = 32, 8, 16, 2 * 128 * 2
"""Llama 3 8B in bfloat16."""
SIZES = (1_200, 5_800, 16_000)
FILE_TOKENS = 256
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
ROUNDS = 5


def median_s(work: Callable[[], object], *, rounds: int = ROUNDS) -> float:
    """Return the median duration of some calls, after one that is not counted."""
    taken = []
    for _ in range(rounds + 1):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken[1:])


def link_gb_s() -> dict[str, float]:
    """Return the rate of one large copy of pinned memory each way."""
    if not torch.cuda.is_available():
        return {"save": 0.0, "load": 0.0}
    host = torch.ones(256 << 20, dtype=torch.uint8).pin_memory()
    device = host.cuda()

    def copied(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    ways = {"save": lambda: copied(host, device), "load": lambda: copied(device, host)}
    return {way: host.numel() / median_s(work) / 1e9 for way, work in ways.items()}


def opened(kv: dict[str, torch.Tensor], num_blocks: int) -> DeviceLayers:
    """Return the layers, over the GPU's driver or its twin."""
    if torch.cuda.is_available():
        layers = open_layers(kv, num_blocks, [list(kv)])
        assert isinstance(layers, DeviceLayers)
        return layers
    return DeviceLayers(*layer_views(kv, num_blocks, [list(kv)]), HostDriver(list(kv.values())))


def copied(layers: DeviceLayers, num_pages: int, num_blocks: int) -> dict[str, float]:
    """Return GB/s of a save and a load of scattered blocks in files of `FILE_TOKENS`, and the steps of a load in ms."""
    pages_of_file = min(FILE_TOKENS // BLOCK_TOKENS, num_pages)
    size = pages_of_file * page_bytes(layers.shapes[0])
    num_files = num_pages // pages_of_file
    memory = np.frombuffer(mmap.mmap(-1, -(-num_files * size // mmap.PAGESIZE) * mmap.PAGESIZE), dtype=np.uint8)
    memory[:] = 0
    owners: list[Owner] = []
    register(layers, memory, owners)
    ids = np.random.default_rng(1).permutation(num_blocks)[: num_files * pages_of_file].tolist()
    copies = [
        PageCopy(
            0,
            ids[number * pages_of_file : (number + 1) * pages_of_file],
            memory[number * size : (number + 1) * size],
            pages_of_file,
            after=layers.fence(),
            proof="digests",
        )
        for number in range(num_files)
    ]
    spent = Spent()
    found = {
        "save_gb_s": num_files * size / median_s(lambda: layers.gather(copies)) / 1e9,
        "load_gb_s": num_files * size / median_s(lambda: layers.scatter(copies, spent)) / 1e9,
    }
    calls = ROUNDS + 1
    found |= {f"{name}_ms": getattr(spent, f"{name}_s") * 1000 / calls for name in ("submit", "gil", "copy", "verify")}
    owners.clear()
    return found


def layouts(num_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield figures of one context of an 8B model in both layouts."""
    num_pages = num_tokens // BLOCK_TOKENS
    num_blocks = 2 * num_pages
    for order in ("LBHNC", "BLNHC"):
        axes = ORDERS[order]
        shape = (LAYERS, num_blocks, HEADS, BLOCK_TOKENS, CONTENT_BYTES)
        storage = torch.zeros([shape[axis] for axis in axes], dtype=torch.uint8, device=device())
        logical = storage.permute([axes.index(axis) for axis in range(5)])
        layers = opened({f"l{number}": logical[number] for number in range(LAYERS)}, num_blocks)
        yield {"layout": order, "tokens": num_tokens, **copied(layers, num_pages, num_blocks)}


def chunks(total_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield figures of one plane with blocks of several sizes."""
    for chunk_bytes in (8 << 10, 28 << 10, 64 << 10, 1 << 20, 4 << 20):
        num_pages = max(total_bytes // chunk_bytes // 16 * 16, 16)
        kv = torch.zeros(2 * num_pages, 1, 1, chunk_bytes, dtype=torch.uint8, device=device())
        layers = opened({"layer": kv}, 2 * num_pages)
        yield {"chunk_bytes": chunk_bytes, "chunks": num_pages, **copied(layers, num_pages, 2 * num_pages)}


def digests_gb_s(total_bytes: int) -> dict[str, float]:
    """Return the rate of digests by torch's operations, and by the kernel where there is a GPU."""
    plane = torch.zeros(total_bytes >> 20, 1 << 20, dtype=torch.uint8, device=device())
    ids = torch.arange(len(plane), device=device())
    ways = {"torch": lambda: page_digests([plane], ids)}
    if torch.cuda.is_available():
        from vllm_plugin.connector.copies.digest_kernel import page_digests_by_kernel

        ways["kernel"] = lambda: page_digests_by_kernel([plane], ids)
    # The answer's copy to the host waits for it.
    return {way: total_bytes / median_s(lambda work=work: work().cpu()) / 1e9 for way, work in ways.items()}


def device() -> torch.device:
    """Return the GPU; the CPU in a dry run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def first_tokens(start: Start, sizes: tuple[int, ...], sidecar: SidecarProcess | None, rounds: int) -> dict[str, Any]:
    """Return medians in ms of a system's first tokens, and the time of decoding beside loads as a share of alone."""
    source, found = random.Random(2), {}
    with TinyEngine(start) as engine:
        held: list[tuple[list[int], str]] = []
        for size in sizes:
            taken: dict[str, list[float]] = {"cold": [], "hit": [], "restored": []}
            for _ in range(rounds + 1):
                prompt, ref = source.choices(range(1, 400), k=size), new_cache_ref()
                save = {"save": ref} if sidecar else {}
                for way, more in (("cold", save), ("hit", {}), ("restored", {"load": (ref,)} if sidecar else {})):
                    if way == "restored":
                        if sidecar:
                            sidecar.wait_sealed(ref)
                        engine.order("forget", connector=False)
                    began_s = time.perf_counter()
                    engine.ask(prompt, num_tokens=1, **more)
                    taken[way].append((time.perf_counter() - began_s) * 1000)
            held.append((prompt, ref))
            found[str(size)] = {way: round(statistics.median(own[1:]), 2) for way, own in taken.items()}
        if sidecar:
            long = {"prompt": held[0][0], "num_tokens": 100}
            alone_s = median_s(lambda: engine.ask_all([long]), rounds=rounds)
            engine.order("forget", connector=False)
            began_s = time.perf_counter()
            engine.ask_all([long, {"prompt": held[-1][0], "num_tokens": 1, "load": (held[-1][1],)}])
            found["decode_beside_load"] = round(alone_s / (time.perf_counter() - began_s), 3)
    return found


def systems(
    model: str, sizes: tuple[int, ...], rounds: int, engine_args: dict[str, Any], *, dry: bool
) -> dict[str, Any]:
    """Return first tokens of our connector, with `q4` too, and of vLLM's own on a GPU."""
    found: dict[str, Any] = {}
    for name, codec in (("ours", "none"), ("ours_q4", "q4")):
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "secret").write_bytes(SECRET)
            limit_bytes = (64 << 20) if dry else (24 << 30)
            sidecar = SidecarProcess(Path(directory), block_tokens=FILE_TOKENS, memory_limit_bytes=limit_bytes)
            sidecar.start()
            try:
                secret = str(Path(directory) / "secret")
                start = Start(model, sidecar.address, secret, engine_args=engine_args, connector={"codec": codec})
                found[name] = first_tokens(start, sizes, sidecar, rounds)
            finally:
                sidecar.kill()
    if not dry:
        extra = {"kv_connector_extra_config": {"cpu_bytes_to_use": 24 << 30}}
        start = Start(model, engine_args=engine_args, kv_transfer=OFFLOADING | extra)
        found["vllm_offloading"] = first_tokens(start, sizes, None, rounds)
    return found


def bars(found: dict[str, Any]) -> Iterator[tuple[str, float, float, bool]]:
    """Yield each bar: name, figure, limit, whether it is met."""
    load_gb_s = found["link"]["load"]
    best = max(own["load_gb_s"] for own in found["layouts"])
    yield "load, share of the link", best / load_gb_s, 0.8, best / load_gb_s >= 0.8
    for size in SIZES:
        own, theirs = (found["first_tokens"][name][str(size)] for name in ("ours", "vllm_offloading"))
        limit = own["hit"] + 1.25 * size * (128 << 10) / load_gb_s / 1e6 + 5
        yield f"first token, {size} tokens, ms", own["restored"], limit, own["restored"] <= limit
        yield (
            f"beside vLLM's, {size} tokens, ms",
            own["restored"],
            theirs["restored"],
            own["restored"] <= theirs["restored"],
        )
    share = found["first_tokens"]["ours"]["decode_beside_load"]
    yield "decoding beside loads, share of alone", share, 0.97, share >= 0.97


def main() -> None:
    """Measure, print the bars, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory of Llama 3 8B, or a model of its shape")
    parser.add_argument("--out", type=Path, default=Path("bench_gpu.json"), help="where the JSON goes")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with a tiny model")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    dry = given.dry_run
    if not dry and not (torch.cuda.is_available() and given.model):
        parser.error("a GPU and --model are needed; --dry-run goes without both")
    began_s = time.monotonic()
    if not dry:
        subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/gpu"], check=False, timeout=240)
    found: dict[str, Any] = {"link": link_gb_s()}
    found["layouts"] = list(layouts(256 if dry else 16_000))
    found["chunks"] = list(chunks((4 << 20) if dry else (512 << 20)))
    found["digests"] = digests_gb_s((4 << 20) if dry else (2 << 30))
    with tempfile.TemporaryDirectory() as directory:
        model = str(make_tiny_model(Path(directory) / "model")) if dry else given.model
        engine_args = (
            {} if dry else {"dtype": "bfloat16", "block_size": 16, "enforce_eager": False, "max_model_len": 20_000}
        )
        sizes, rounds = ((150, 600), 1) if dry else (SIZES, given.rounds)
        found["first_tokens"] = systems(model, sizes, rounds, engine_args, dry=dry)
    found["duration_s"] = round(time.monotonic() - began_s)
    given.out.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    if not dry:
        for name, figure, limit, is_met in bars(found):
            print(f"{'met   ' if is_met else 'MISSED'} {name}: {figure:.2f} (bar {limit:.2f})")


if __name__ == "__main__":
    main()
