"""What a checksum of a block file costs: XXH3-128, which we use, beside what could have been used instead.

All in one process, one thread, over the same bytes, interleaved (each round takes every algorithm once), medians. What
it does not measure: blake3's own threads, which would take cores from the engine, and bytes that are not in cache (a
block just read from disk is).

Why XXH3-128: a checksum is computed where a block is written and again at every read, before its bytes are handed on,
so it must cost little beside the copy (`memcpy` below). Its 128 bits are wide enough to stand for the bytes in a
manifest (no two of all blocks ever stored share one by accident); 32 are not, and 64 save nothing that counts. A
cryptographic hash costs several times (blake3) to a hundred times (SHA-256) as much and adds nothing: who can write
our files can write our manifests.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
import zlib
from collections.abc import Callable
from importlib.metadata import version

import blake3
import xxhash

from benchmarks.result import parser_of, write_result
from deploy.local.table import render

SIZES = {"64 KiB": 1 << 16, "5.9 MB block": 5_898_240, "64 MiB": 64 << 20}
"""A tail of a small model, a block of SmolLM2 in bfloat16, one of a large model."""
ALGORITHMS: dict[str, tuple[int, Callable[[bytes], object]]] = {
    # name: bits, how it is called
    "XXH3-128": (128, xxhash.xxh3_128_hexdigest),
    "XXH3-64": (64, xxhash.xxh3_64_hexdigest),
    "blake3": (256, lambda data: blake3.blake3(data).hexdigest()),
    "SHA-256": (256, lambda data: hashlib.sha256(data).hexdigest()),
    "CRC32 (zlib)": (32, zlib.crc32),
    "memcpy": (0, bytearray),
}


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Return the median ms of every algorithm for every size."""
    found: dict[str, dict[str, float]] = {}
    for name, size in SIZES.items():
        data = os.urandom(size)
        samples: dict[str, list[float]] = {algorithm: [] for algorithm in ALGORITHMS}
        for _ in range(rounds + 1):
            for algorithm, (_, digest) in ALGORITHMS.items():
                began_s = time.perf_counter()
                digest(data)
                samples[algorithm].append((time.perf_counter() - began_s) * 1000)
        # The first round touches the memory for all of them.
        found[name] = {algorithm: round(statistics.median(taken[1:]), 4) for algorithm, taken in samples.items()}
    return found


def table(found: dict[str, dict[str, float]]) -> str:
    """Return the figures for a person: ms, and GB/s for a block."""
    block = list(SIZES)[1]
    heads = ["algorithm", "bits", *(f"{name}, ms" for name in SIZES), "GB/s"]
    rows = [
        [
            algorithm,
            str(bits) if bits else "-",
            *(f"{found[name][algorithm]:.3f}" for name in SIZES),
            f"{SIZES[block] / found[block][algorithm] / 1e6:.1f}",
        ]
        for algorithm, (bits, _) in ALGORITHMS.items()
    ]
    return render(heads, rows)


def main() -> None:
    """Measure, print, and write the figures."""
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--rounds", type=int, default=31, help="measured rounds of each size")
    arguments = parser.parse_args()
    found = measure(arguments.rounds)
    print(table(found))
    versions = {name: version(name) for name in ("xxhash", "blake3")}
    write_result(arguments.out, {"rounds": arguments.rounds, "versions": versions, "median_ms": found})


if __name__ == "__main__":
    main()
