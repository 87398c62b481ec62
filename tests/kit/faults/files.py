"""Stored files by kind, and what can happen to one: flipped, truncated, removed, swapped, aged, replaced.

Parts under test run as one user, and often as root, whom no file mode keeps out: `unreadable` is then no fault at all,
and says so by `can_be_unreadable`. What a copy in memory can suffer of these: arena.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import xxhash

from kv_sidecar.format.manifest import manifest_checksum
from kv_sidecar.format.safetensors_header import TensorHeader, decode_header, encode_header

Kind = Literal["block", "tail", "manifest"]
KINDS: tuple[Kind, ...] = ("block", "tail", "manifest")
_DIRECTORIES = {"block": "blocks", "tail": "tails", "manifest": "manifests"}


@dataclass(frozen=True)
class StoredFiles:
    """One sidecar's files."""

    data_directory: Path

    def on_disk(self, kind: Kind) -> list[Path]:
        """Files of a kind, the ones written last at the end."""
        return _by_age((self.data_directory / _DIRECTORIES[kind]).glob("*/*.safetensors"))

    def manifest_of(self, cache_ref: str) -> Path:
        """Where a manifest lies on disk."""
        return self.data_directory / "manifests" / cache_ref.removeprefix("ref_")[:2] / f"{cache_ref}.safetensors"

    def all_on_disk(self) -> list[Path]:
        """Every stored file."""
        return [path for kind in KINDS for path in self.on_disk(kind)]

    def quarantined(self) -> list[Path]:
        """Files the sidecar has put aside."""
        return sorted((self.data_directory / "quarantine").iterdir())

    def size_bytes(self) -> int:
        """Bytes of all stored files on disk."""
        return sum(path.stat().st_size for path in self.all_on_disk())


def _by_age(paths: object) -> list[Path]:
    return sorted(paths, key=lambda path: (path.lstat().st_mtime_ns, path.name))


# One file and, for swaps, another of the same kind. All work in place or by rename, and leave the size right.


def flip_data_bit(path: Path, other: Path) -> None:
    """Change the lowest bit of a byte in the middle of the tensor."""
    _flip(path, (_start(path) + path.stat().st_size) // 2, 0x01)


def flip_last_bit(path: Path, other: Path) -> None:
    """Change the highest bit of the last byte."""
    _flip(path, path.stat().st_size - 1, 0x80)


def flip_header_bit(path: Path, other: Path) -> None:
    """Change one bit of a value in the head: a digit of the tenant, the fingerprint or a checksum."""
    head = path.read_bytes()[: _start(path)]
    _flip(path, head.index(b'"fingerprint":"') + len(b'"fingerprint":"') + 3, 0x01)


def flip_length_bit(path: Path, other: Path) -> None:
    """Change the length of the head: the highest of its 64 bits."""
    _flip(path, 7, 0x80)


def empty(path: Path, other: Path) -> None:
    """Leave a file of no bytes."""
    os.truncate(path, 0)


def zero(path: Path, other: Path) -> None:
    """Leave zeros: a page that was never written, or lost its contents."""
    _replace(path, bytes(path.stat().st_size))


def halve(path: Path, other: Path) -> None:
    """Leave the first half."""
    os.truncate(path, path.stat().st_size // 2)


def cut_last_byte(path: Path, other: Path) -> None:
    """Leave all but the last byte."""
    os.truncate(path, path.stat().st_size - 1)


def append_byte(path: Path, other: Path) -> None:
    """Leave one byte too many."""
    with path.open("ab") as file:
        file.write(b"\0")


def remove(path: Path, other: Path) -> None:
    """Take the file away."""
    path.unlink()


def swap_whole(path: Path, other: Path) -> None:
    """Put another file's bytes under this one's name, head and all."""
    _replace(path, other.read_bytes())


def swap_data(path: Path, other: Path) -> None:
    """Put another file's tensor into this one, and rewrite the checksum so that the file itself is in order."""
    mine, theirs = path.read_bytes(), other.read_bytes()
    header, start = decode_header(memoryview(mine))
    their_header, their_start = decode_header(memoryview(theirs))
    _replace(path, _sealed(header, their_header.shape, theirs[their_start:]))
    assert path.read_bytes() != mine, "the two held the same bytes"
    del start


def rewrite_data(path: Path, other: Path) -> None:
    """Change many bytes of the tensor, and rewrite the file's own checksum."""
    whole = path.read_bytes()
    header, start = decode_header(memoryview(whole))
    tensor = bytearray(whole[start:])
    step = 64 if header.dtype == "U8" else 4
    for position in range(step - 2, len(tensor), step):
        tensor[position] ^= 0x01
    _replace(path, _sealed(header, header.shape, bytes(tensor)))


def expire(path: Path, other: Path) -> None:
    """Let a manifest have ended an hour after 1970, its checksum rewritten; a block has no time of its own."""
    whole = path.read_bytes()
    header, start = decode_header(memoryview(whole))
    if "expires_at_ms" in header.metadata:
        metadata = dict(header.metadata) | {"expires_at_ms": "3600000"}
        _replace(path, _sealed(TensorHeader(header.tensor, header.dtype, header.shape, metadata), None, whole[start:]))
    age(path, other)


def age(path: Path, other: Path) -> None:
    """Make the file look as if it had been written in 1970."""
    os.utime(path, (3600, 3600))


def become_directory(path: Path, other: Path) -> None:
    """Put a directory, not empty, in the file's place."""
    path.unlink()
    (path / "something").mkdir(parents=True)


def become_fifo(path: Path, other: Path) -> None:
    """Put a named pipe in the file's place: opening it for reading waits for a writer that never comes."""
    path.unlink()
    os.mkfifo(path)


def become_dangling_link(path: Path, other: Path) -> None:
    """Put a link to nothing in the file's place."""
    path.unlink()
    path.symlink_to(path.with_name("nothing"))


def become_link_loop(path: Path, other: Path) -> None:
    """Put a link to itself in the file's place."""
    path.unlink()
    path.symlink_to(path.name)


def become_unreadable(path: Path, other: Path) -> None:
    """Take away every right; root reads it all the same."""
    path.chmod(0)


def can_be_unreadable() -> bool:
    """Whether a file's mode keeps this user out at all."""
    return os.geteuid() != 0


Fault = Callable[[Path, Path], None]
FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        flip_data_bit,
        flip_last_bit,
        flip_header_bit,
        flip_length_bit,
        empty,
        zero,
        halve,
        cut_last_byte,
        append_byte,
        remove,
        swap_whole,
        swap_data,
        rewrite_data,
        expire,
        age,
        become_directory,
        become_fifo,
        become_dangling_link,
        become_link_loop,
        become_unreadable,
    )
}
"""By name. Each takes the file and, for swaps, another one of its kind."""
HARMLESS = {"age"} | (set() if can_be_unreadable() else {"become_unreadable"})
"""Those that leave the bytes as they are and readable: the KV may be used."""


def clear_away(path: Path) -> None:
    """Remove whatever a fault has put in a file's place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _start(path: Path) -> int:
    """Where the tensor begins."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def _flip(path: Path, position: int, bits: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ bits]))


def _sealed(header: TensorHeader, shape: tuple[int, ...] | None, tensor: bytes) -> bytes:
    """Return a file whose own checksum is right, whatever else is not."""
    metadata = {key: value for key, value in header.metadata.items() if key != "checksum"}
    if metadata["format"].startswith("context-cache-manifest"):
        metadata["checksum"] = manifest_checksum(metadata, tensor)
    else:
        metadata["checksum"] = xxhash.xxh3_128_hexdigest(tensor)
    return encode_header(TensorHeader(header.tensor, header.dtype, shape or header.shape, metadata)) + tensor


def _replace(path: Path, data: bytes) -> None:
    """Write beside it and rename: nobody who has the old file mapped sees it change."""
    beside = path.with_name(f".{path.name}.fault")
    beside.write_bytes(data)
    beside.chmod(path.stat().st_mode & 0o777)
    beside.rename(path)
