"""What a look-up by tokens costs: against the tokens of the prompt, and against the blocks that are indexed.

The sidecar's own code, without its wire: a prompt is hashed in a thread, then searched for on the event loop; off the
engine's thread both. Contexts have 4 096 tokens in blocks of 256 and share their first half, as with one system prompt.
Rounds go through all sizes in turn. Bytes are what the index itself has allocated, by Python's own count.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fit import grown, table
from benchmarks.result import RESULTS, write_result
from contextcache.names import new_cache_ref
from deploy.local.progress import Step
from kv_sidecar.sealed.prefixes import ID_BYTES, Beginning, PrefixIndex, prompt_of

TENANT, FINGERPRINT = "demo", "f" * 64
BLOCK_TOKENS, CONTEXT_BLOCKS, SHARED_BLOCKS = 256, 16, 8
BLOCKS = (1_000, 10_000, 100_000)
TOKENS = (8_192, 32_768, 131_072)
LOOK_UP_MS_MAX = 10.0
"""For a prompt of 128k tokens."""


def main() -> int:
    """Measure, print the table, write the JSON; with --check exit 1 when a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    parser.add_argument("--out", type=Path, default=RESULTS / "bench_prefixes.json", help="where the JSON goes")
    options = parser.parse_args()
    with Step("indexes of up to 100 000 blocks"):
        indexes = {blocks: indexed(blocks) for blocks in BLOCKS}
    found_us, hashed_ms = defaultdict(list), defaultdict(list)
    with Step(f"{options.rounds} rounds"):
        for _ in range(options.rounds):
            for blocks, (index, _) in indexes.items():
                found_us[blocks].append(timed(index, TOKENS[0])[1] * 1000)
            for tokens in TOKENS:
                hashed_ms[tokens].append(sum(timed(indexes[BLOCKS[-1]][0], tokens)))
    rows = [
        grown("find, by blocks indexed", "us", found_us, (None, 0.2)),
        grown("hash and find, by tokens", "ms", hashed_ms, (None, 1.1)),
        grown("bytes a block, by blocks indexed", "B", {blocks: [size] for blocks, (_, size) in indexes.items()}),
    ]
    longest_ms = float(np.median(hashed_ms[TOKENS[-1]]))
    met = longest_ms <= LOOK_UP_MS_MAX
    print(table(rows))
    print(f"128k tokens: {longest_ms:.2f} ms, at most {LOOK_UP_MS_MAX:.0f}: {'met' if met else 'MISSED'}")
    report: dict[str, Any] = {"rounds": options.rounds, "rows": rows, "longest_ms": longest_ms, "longest_met": met}
    write_result(options.out, report)
    return 1 if options.check and not (met and all(row["met"] is not False for row in rows)) else 0


def indexed(num_blocks: int) -> tuple[PrefixIndex, float]:
    """Return an index of so many blocks, and the bytes that each costs."""
    shared = secrets.token_bytes(SHARED_BLOCKS * ID_BYTES)
    tracemalloc.start()
    index = PrefixIndex()
    for _ in range(num_blocks // CONTEXT_BLOCKS):
        chain = shared + secrets.token_bytes((CONTEXT_BLOCKS - SHARED_BLOCKS) * ID_BYTES)
        index.add(new_cache_ref(), Beginning(TENANT, FINGERPRINT, BLOCK_TOKENS, chain, b"", is_plain=True))
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return index, allocated / num_blocks


def timed(index: PrefixIndex, num_tokens: int) -> tuple[float, float]:
    """Look up a prompt that nobody has; return the ms of its hashing and of the search."""
    token_ids = np.random.default_rng().integers(0, 49_152, num_tokens, dtype="<u4").tobytes()
    began_s = time.perf_counter()
    prompt = prompt_of(TENANT, FINGERPRINT, token_ids, (BLOCK_TOKENS,))
    hashed_s = time.perf_counter()
    index.find(prompt, lambda _: True)
    return (hashed_s - began_s) * 1000, (time.perf_counter() - hashed_s) * 1000


if __name__ == "__main__":
    sys.exit(main())
