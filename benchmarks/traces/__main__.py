"""Make `coding_agents.json` from the `traces` directory of a kv-cache-tester checkout, named by its commit."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.traces import BLOCK_TOKENS, FILE, SCALE

SOURCE, LICENCE = "https://github.com/callanjfox/kv-cache-tester", "Apache-2.0"
REQUESTS, TOKENS_MAX, SESSIONS = range(20, 31), 100_000, 14
"""Sessions that are taken: the first with so many requests, none longer, without sub-agents, none twice."""


def main() -> None:
    """Read the recorded sessions, write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="the checkout's `traces` directory")
    directory: Path = parser.parse_args().directory
    asked = ("git", "-C", str(directory), "rev-parse", "HEAD")
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    source = {"repository": SOURCE, "commit": commit, "licence": LICENCE, "scale": SCALE}
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in taken(directory))
    FILE.write_text(f'{{"source":{json.dumps(source)},\n"sessions":[\n{lines}\n]}}\n')


def taken(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the sessions that are taken, in the order of their names."""
    seen: set[tuple[int, ...]] = set()
    for file in sorted(directory.glob("*.json")):
        raw = file.read_bytes()
        requests = json.loads(raw)["requests"]
        lengths = tuple(request["in"] for request in requests if "hash_ids" in request)
        if len(lengths) not in REQUESTS or len(lengths) < len(requests) or max(lengths) > TOKENS_MAX or lengths in seen:
            continue
        seen.add(lengths)
        told = [
            {"blocks": _runs(request["hash_ids"]), "out": max(1, round(request["out"] / SCALE))} for request in requests
        ]
        yield {"name": file.stem, "sha256": hashlib.sha256(raw).hexdigest(), "requests": told}
        if len(seen) == SESSIONS:
            return


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the numbers as runs, each by its first and its last."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] + 1 == number:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


assert BLOCK_TOKENS * SCALE == 64  # blocks of the recording

if __name__ == "__main__":
    main()
