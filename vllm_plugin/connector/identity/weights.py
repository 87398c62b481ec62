"""Identity of an engine's weights, as short text for the fingerprint: a digest of their files, or the hub's commit.

Equal on all ranks: each reads all files. Weights that cannot be read are `None`: the scheduler's
half takes the weights for new at every start.

The digest of files is made of samples: equal files give an equal digest on every machine. No absolute path, no time of
a file and no order of a directory enters. The work is bounded by the number of tensors, not by their size: names,
types, shapes and offsets whole, and pieces of every tensor, spread over it, at places that follow from its name and
size.

A change that leaves every piece as it was is not seen: one row of one large tensor, edited by hand. Training, merging
and quantising are not like that. Reading everything would take 16 s for 8 GiB. Parameters on the device would need a
digest for each rank, because ranks hold other shards and repacked layouts.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeAlias

log = logging.getLogger(__name__)

_TIMEOUT_S = 60.0
"""Bound on reading; 8 GB of local files take well under a second. A longer start would cost more than KV that does not
outlive its engine."""
_LOCAL_FORMATS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)
"""Load formats that read the model's directory, or the hub's cache. Others (tensorizer, a cache daemon, another
engine, a plugin) read elsewhere."""


SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
PIECE_BYTES = 4096
PIECES_MAX = 16_384
"""Pieces of all tensors together (64 MiB), except that every tensor has one."""
PIECES_PER_TENSOR = 8
_OPAQUE_PIECES = 4096
"""Pieces of a file whose tensors are not told apart."""
_OPAQUE_ENDS_BYTES = 1 << 20
"""Read whole at both ends of such a file: names and sizes are there, and torch's checksum of every tensor."""
_HEADER_BYTES_MAX = 100_000_000
"""As the safetensors library allows."""
_FILES_MAX = 4096
_THREADS = 16
"""Reads at once: a network file system takes about a millisecond for each, however many there are."""
_READS_PER_TASK = 128

_Read: TypeAlias = tuple[int, int]
"""Offset and length in a file, in bytes."""
_Tensor: TypeAlias = tuple[str, int, int]
"""Stretch of a file that pieces are taken of: name, offset and length in bytes."""


class UnreadableWeights(Exception):  # a finding that the caller turns into "not known"
    """The files cannot be read, are not whole, or take too long."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Digest of the samples, and their number and size."""

    sha256: str
    num_files: int
    size_bytes: int
    num_reads: int


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    name: str
    """Relative to the directory."""
    size_bytes: int
    header: bytes
    tensors: tuple[_Tensor, ...]
    """Empty: not told apart."""

    def reads(self, pieces_per_tensor: int) -> Iterator[_Read]:
        """Yield the reads beside the header, `pieces_per_tensor` of each tensor at most."""
        if self.tensors:
            for tensor in self.tensors:
                yield from pieces(*tensor, min(pieces_per_tensor, PIECES_PER_TENSOR))
            return
        ends = min(_OPAQUE_ENDS_BYTES, self.size_bytes)
        yield 0, ends
        yield self.size_bytes - ends, ends
        yield from pieces(self.name, 0, self.size_bytes, _OPAQUE_PIECES)


def weights_identity(vllm_config: Any) -> str | None:
    """Return the identity of the weights, a draft model's included; None where it is not known."""
    ends_at_s = time.monotonic() + _TIMEOUT_S
    found = [_identity(model, load, ends_at_s) for model, load in models(vllm_config)]
    return None if None in found else " ".join(map(str, found))


def models(vllm_config: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the model, and the draft model if that is another one, each with how it is loaded."""
    target, load = vllm_config.model_config, vllm_config.load_config
    yield target, load
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and (draft.model, draft.revision) != (target.model, target.revision):
        yield draft, getattr(speculative, "draft_load_config", None) or load


def _identity(model: Any, load: Any, ends_at_s: float) -> str | None:
    load_format = str(load.load_format)
    if load_format == "dummy" and model.quantization is None:
        # Random from a fixed seed: equal for an equal configuration. Quantised weights hold bytes that lay in memory.
        return "dummy"
    # Set where the directory holds the configuration only, and the weights come from an object store.
    uri = getattr(model, "model_weights", None)
    if load_format not in _LOCAL_FORMATS or uri:
        return None
    path = Path(model.model)
    return _files(path, load, ends_at_s) if path.exists() else _hub_commit(model, load)


def _files(path: Path, load: Any, ends_at_s: float) -> str | None:
    started_s = time.monotonic()
    try:
        patterns = getattr(load, "ignore_patterns", None) or ()
        found = sample(path, ignored=[patterns] if isinstance(patterns, str) else patterns, ends_at_s=ends_at_s)
    except (UnreadableWeights, OSError) as exc:
        log.warning("weights not sampled", extra={"reason": str(exc)})
        return None
    took_ms = round((time.monotonic() - started_s) * 1000)
    facts = {"num_files": found.num_files, "size_bytes": found.size_bytes, "duration_ms": took_ms}
    log.info("weights sampled", extra=facts)
    return f"files:{found.sha256}"


def _hub_commit(model: Any, load: Any) -> str | None:
    """Return the commit that the revision names in the hub's local cache, which the loader has just read."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            str(model.model),
            revision=model.revision,
            cache_dir=getattr(load, "download_dir", None),
            local_files_only=True,
        )
    except (OSError, ValueError):
        return None
    return f"commit:{Path(folder).name}"


def sample(root: Path, *, ignored: Sequence[str] = (), ends_at_s: float = float("inf")) -> Sample:
    """Read the weight files under a directory, or the one file; `ignored` are patterns of relative names.

    `ends_at_s` is on the monotonic clock. Raises UnreadableWeights and OSError.
    """
    found = [(root, root.name)] if root.is_file() else sorted(_weight_files(root, ignored), key=lambda entry: entry[1])
    if not 0 < len(found) <= _FILES_MAX:
        raise UnreadableWeights(f"{len(found)} weight files; allowed: 1 to {_FILES_MAX}")
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="context-cache-weights") as pool:
        files = list(pool.map(_open, found))
        limit = max(1, PIECES_MAX // max(sum(len(file.tensors) for file in files), 1))
        tasks = [(file, reads) for file in files for reads in _tasks(file, limit)]
        digests = list(pool.map(lambda task: _digest(task[0].path, task[1], ends_at_s), tasks))
    whole = hashlib.sha256()
    for file in files:
        whole.update(json.dumps([file.name, file.size_bytes, hashlib.sha256(file.header).hexdigest()]).encode())
    for digest in digests:
        whole.update(digest)
    reads = [read for _, some in tasks for read in some]
    size_bytes = sum(length for _, length in reads) + sum(len(file.header) for file in files)
    return Sample(whole.hexdigest(), len(files), size_bytes, len(reads) + len(files))


def _weight_files(root: Path, ignored: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Yield path and relative name of files that may be loaded: one too many makes a miss, one too few a wrong hit."""
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
        for name in names:
            path = Path(directory, name)
            relative = path.relative_to(root).as_posix()
            if path.suffix in SUFFIXES and not any(fnmatch(relative, pattern) for pattern in ignored):
                yield path, relative


def _open(found: tuple[Path, str]) -> _File:
    path, name = found
    with path.open("rb", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        header = _header(file.fileno(), size_bytes) if path.suffix == ".safetensors" else b""
    return _File(path, name, size_bytes, header, _tensors(header, size_bytes))


def _header(descriptor: int, size_bytes: int) -> bytes:
    """Return a safetensors file's JSON; empty for another format."""
    prefix = os.pread(descriptor, 8, 0)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(_HEADER_BYTES_MAX, size_bytes - 8):
        return b""
    return _read_whole(descriptor, 8, length)


def _tensors(header: bytes, size_bytes: int) -> tuple[_Tensor, ...]:
    """Return the tensors by their names; nothing for a header that cannot be believed."""
    try:
        entries = json.loads(header or b"{}")
        entries.pop("__metadata__", None)
        first = 8 + len(header)
        spans = [(name, *map(int, entry["data_offsets"])) for name, entry in sorted(entries.items())]
    except (AttributeError, KeyError, TypeError, ValueError):
        return ()
    if not all(0 <= start <= end <= size_bytes - first for _, start, end in spans):
        return ()
    return tuple((name, first + start, end - start) for name, start, end in spans if end > start)


def pieces(name: str, first: int, size_bytes: int, count: int) -> Iterator[_Read]:
    """Yield one piece in each of `count` equal parts of a tensor, or the whole of a small one."""
    if size_bytes <= count * PIECE_BYTES:
        yield first, size_bytes
        return
    places = hashlib.shake_256(f"{name}/{size_bytes}".encode()).digest(8 * count)
    for index in range(count):
        start, end = (size_bytes * edge // count for edge in (index, index + 1))
        room = end - start - PIECE_BYTES + 1
        yield first + start + int.from_bytes(places[8 * index : 8 * index + 8], "little") % room, PIECE_BYTES


def _tasks(file: _File, pieces_per_tensor: int) -> Iterator[list[_Read]]:
    reads = list(file.reads(pieces_per_tensor))
    for start in range(0, len(reads), _READS_PER_TASK):
        yield reads[start : start + _READS_PER_TASK]


def _digest(path: Path, reads: Sequence[_Read], ends_at_s: float) -> bytes:
    """Hash pieces; their lengths follow from the header, so they need no marks between them."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        # Else the kernel reads a cold file ahead, many times as much.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for offset, length in reads:
            if time.monotonic() > ends_at_s:
                raise UnreadableWeights("the time limit of the weight sample is reached")
            digest.update(_read_whole(file.fileno(), offset, length))
    return digest.digest()


def _read_whole(descriptor: int, offset: int, length: int) -> bytes:
    data = os.pread(descriptor, length, offset)
    while len(data) < length:
        more = os.pread(descriptor, length - len(data), offset + len(data))
        if not more:
            raise UnreadableWeights("a weight file became shorter")
        data += more
    return data
