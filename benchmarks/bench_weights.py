"""What telling weights apart costs at an engine's start: files sampled, warm and cold, beside reading them whole.

Makes files of random bytes with the tensors of an 8-billion-parameter model, and removes them.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.result import parser_of, write_result
from vllm_plugin.connector.identity.weights import sample

_SHARD_BYTES = 2 << 30
_TENSORS = 291
_CHUNK_BYTES = 16 << 20


def main() -> None:
    parser = parser_of(__file__, __doc__)
    parser.add_argument("--gib", type=int, default=8, help="size of the weights that are made up")
    parser.add_argument("--directory", type=Path, help="where they are made, and removed")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        figures = _measure(Path(name), args.gib << 30)
    print(json.dumps(figures))
    for key, value in figures.items():
        print(f"{key:<28}{value:>14}")
    write_result(args.out, figures)


def _measure(directory: Path, size_bytes: int) -> dict[str, float]:
    shards = size_bytes // _SHARD_BYTES
    for index in range(shards):
        _write(directory / f"model-{index}.safetensors", _SHARD_BYTES, _TENSORS // shards, first=index)
    warm = sample(directory)
    figures = {
        "size_bytes": size_bytes,
        "num_tensors": _TENSORS // shards * shards,
        "sampled_bytes": warm.size_bytes,
        "num_reads": warm.num_reads,
        "sample_warm_ms": _best_ms(lambda: sample(directory), times=5),
        "whole_sha256_warm_ms": _best_ms(lambda: _whole(directory), times=1),
    }
    cold = []
    for _ in range(3):
        _forget(directory)
        cold.append(_best_ms(lambda: sample(directory), times=1))
    _forget(directory)
    figures |= {"sample_cold_ms": sorted(cold)[1], "whole_cold_ms": _best_ms(lambda: _whole(directory), times=1)}
    return figures


def _write(path: Path, size_bytes: int, num_tensors: int, *, first: int) -> None:
    each = size_bytes // num_tensors
    header = {
        f"model.layers.{first}.{index}.weight": {
            "dtype": "BF16",
            "shape": [each // 2],
            "data_offsets": [index * each, (index + 1) * each],
        }
        for index in range(num_tensors)
    }
    spelled = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(spelled)) + spelled)
        for start in range(0, num_tensors * each, _CHUNK_BYTES):
            file.write(os.urandom(min(_CHUNK_BYTES, num_tensors * each - start)))
        os.fsync(file.fileno())


def _whole(directory: Path) -> None:
    for path in directory.iterdir():
        with path.open("rb") as file:
            hashlib.file_digest(file, "sha256")


def _forget(directory: Path) -> None:
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _best_ms(work: Callable[[], object], *, times: int) -> float:
    took = []
    for _ in range(times):
        started_s = time.perf_counter()
        work()
        took.append((time.perf_counter() - started_s) * 1000)
    return round(min(took), 1)


if __name__ == "__main__":
    main()
