"""One block as one file: the only format in the arena, on disk and in frames (docs/project/formats.md).

A safetensors file with one U8 tensor `pages` of shape [bytes]. Its metadata name the engine and the tokens, and hold a
checksum of the tensor's bytes. Places of files belong to the tiers.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from contextcache.errors import CorruptBlock
from contextcache.model import KVFile
from kv_sidecar.format.ids import BlockKey, BlockKind, block_id, pack_token_ids, unpack_token_ids
from kv_sidecar.format.safetensors_header import TensorHeader, decode_header, encode_header

FORMAT = "context-cache-block-2"
TENSOR = "pages"
_CODEC = "codec"
_DIGESTS = "digests"
_DIGEST_DIGITS = 16
_NO_CHECKSUM = "0" * 32
_KINDS: dict[str, BlockKind] = {"block": "block", "tail": "tail"}
_CHECKSUM = re.compile(r"[0-9a-f]{32}")

Pages: TypeAlias = npt.NDArray[np.uint8]
"""`[bytes] u8`: layer after layer of the group, of each the pages of its engine blocks in order; opaque."""


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """Metadata of a block file."""

    kind: BlockKind
    name: str
    """Block id, or the cache_ref for a tail."""
    parent: str
    """Id of the block before it; empty for the first."""
    tenant: str
    fingerprint: str
    rank: int
    token_ids: tuple[int, ...]
    """The tokens it holds, and only those."""
    group: str = ""
    """Digest of its group; empty: all layers of a plain engine."""
    first_token: int = 0
    """First token of a tail with a group; 0 in every other file."""

    @property
    def key(self) -> BlockKey:
        """Where the file belongs."""
        return BlockKey(self.kind, self.name, self.rank, self.group, self.first_token)


def file_meta(
    file: KVFile, *, group: str, tenant: str, fingerprint: str, rank: int, token_ids: tuple[int, ...]
) -> BlockMeta:
    """Return the metadata that a context's file must have. `group`: digest; `token_ids`: the file's."""
    first_token = file.first_token if file.kind == "tail" and group else 0
    return BlockMeta(file.kind, file.name, file.parent, tenant, fingerprint, rank, token_ids, group, first_token)


class BlockFileWriter:
    """A block file under construction in borrowed memory: `begin()`, fill `pages` in place, then `finish()`."""

    def __init__(self, meta: BlockMeta, *, pages_bytes: int, codec: str = "", num_digests: int = 0) -> None:
        """`codec`: how the pages are stored, as their engine spells it; empty: as they are.

        `num_digests`: length that `digests` will have.
        """
        told = _metadata(meta, _NO_CHECKSUM) | ({_CODEC: codec} if codec else {})
        self.digests: Sequence[int] = (0,) * num_digests
        """Digest of each page as the engine had it; set before `finish()`, as many as `num_digests`."""
        if num_digests:
            told[_DIGESTS] = _text_of(self.digests)
        self._head = bytearray(encode_header(TensorHeader(TENSOR, "U8", (pages_bytes,), told)))
        self._start = len(self._head)
        self.size_bytes = self._start + pages_bytes
        """Bytes of the finished file."""
        self._data = memoryview(b"")
        self.pages: Pages = np.empty(0, dtype=np.uint8)
        """To be filled; not to be used after `finish()` or `end()`."""

    def begin(self, room: memoryview) -> None:
        """Take `size_bytes` of writable memory."""
        assert len(room) == self.size_bytes, "more bytes than the file has"
        self._data = room
        self.pages = np.frombuffer(room, dtype=np.uint8, offset=self._start)

    def finish(self) -> memoryview:
        """Compute the checksum and write the head; return the file, which is then complete."""
        self.pages = np.empty(0, dtype=np.uint8)
        self._set("checksum", _checksum(self._data[self._start :]))
        if self.digests:
            self._set(_DIGESTS, _text_of(self.digests))
        self._data[: self._start] = self._head
        return self._data

    def end(self) -> None:
        """Let go of the memory. Harmless when repeated."""
        self.pages = np.empty(0, dtype=np.uint8)
        self._data = memoryview(b"")

    def _set(self, name: str, text: str) -> None:
        """Put a text in place of one of the same length. Other texts escape their quotes, so the name is found."""
        key = f'"{name}":"'.encode()
        start = self._head.index(key) + len(key)
        end = self._head.index(b'"', start)
        assert end - start == len(text), f"{name} has another length than was told"
        self._head[start:end] = text.encode()


class BlockFile:
    """A block file being read. Its head is checked when it is opened, its bytes by `verify()`."""

    def __init__(self, data: memoryview) -> None:
        """Parse `data`, a whole file. Raises CorruptBlock."""
        self.data = data.toreadonly()
        """The whole file."""
        header, start = decode_header(self.data)
        if header.tensor != TENSOR or header.dtype != "U8" or len(header.shape) != 1:
            raise CorruptBlock("the file has no pages")
        self.meta, self.checksum = _meta_of(header.metadata)
        self.codec = header.metadata.get(_CODEC, "")
        """How the pages are stored; empty: as they are."""
        self.digests = _digests_of(header.metadata.get(_DIGESTS, ""))
        """Digest of each page; empty: the engine made none."""
        self.pages: Pages = np.frombuffer(self.data[start:], dtype=np.uint8)
        self._tensor = self.data[start:]

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return len(self.data)

    def verify(self, expected: BlockMeta | None = None, *, vouched: str = "") -> None:
        """Compare the checksum with the bytes, the id with the tokens, and all metadata with `expected` if given.

        `vouched`: the checksum a manifest vouches for; empty: none does. Raises CorruptBlock.
        """
        meta = self.meta
        if expected is not None:
            check_head(meta, self.checksum, expected, vouched=vouched)
        if meta.kind == "block" and block_id(meta.fingerprint, meta.tenant, meta.parent, meta.token_ids) != meta.name:
            raise CorruptBlock("the block's id does not match its tokens")
        if _checksum(self._tensor) != self.checksum:
            raise CorruptBlock("the block's checksum is wrong")

    def close(self) -> None:
        """Let go of the memory it lies in."""
        self.pages = np.empty(0, dtype=np.uint8)
        self._tensor = self.data = memoryview(b"")


def parse_head(data: memoryview) -> tuple[BlockMeta, str]:
    """Return the metadata and the checksum of a block file in memory. Raises CorruptBlock."""
    header, _ = decode_header(data)
    return _meta_of(header.metadata)


def check_head(meta: BlockMeta, checksum: str, expected: BlockMeta, *, vouched: str = "") -> None:
    """Compare metadata and checksum with the expected ones; `vouched` empty: any checksum. Raises CorruptBlock."""
    if meta != expected:
        raise CorruptBlock("the file holds a different block")
    if vouched and checksum != vouched:
        raise CorruptBlock("the block's checksum differs from the manifest")


def parse_block_file(data: bytes | bytearray | memoryview) -> BlockFile:
    """Read a block file held in memory, without copying it. Raises CorruptBlock."""
    return BlockFile(memoryview(data))


def new_checksum() -> Any:
    """Return the checksum of no bytes; `update` it with those of the tensor, in order."""
    return xxhash.xxh3_128()


def _checksum(tensor: memoryview) -> str:
    digest: str = xxhash.xxh3_128_hexdigest(tensor)
    return digest


def _metadata(meta: BlockMeta, checksum: str) -> dict[str, str]:
    return {
        "format": FORMAT,
        "kind": meta.kind,
        "name": meta.name,
        "parent": meta.parent,
        "tenant": meta.tenant,
        "fingerprint": meta.fingerprint,
        "rank": str(meta.rank),
        "token_ids": base64.b64encode(pack_token_ids(meta.token_ids)).decode(),
        "group": meta.group,
        "first_token": str(meta.first_token),
        "checksum": checksum,
    }


def _text_of(digests: Sequence[int]) -> str:
    return "".join([f"{digest:0{_DIGEST_DIGITS}x}" for digest in digests])


def _digests_of(text: str) -> tuple[int, ...]:
    try:
        starts = range(0, len(text), _DIGEST_DIGITS)
        return tuple([int(text[start : start + _DIGEST_DIGITS], 16) for start in starts])
    except ValueError as exc:
        raise CorruptBlock("the block's digests are malformed") from exc


def _meta_of(metadata: Mapping[str, str]) -> tuple[BlockMeta, str]:
    try:
        kind, checksum = metadata["kind"], metadata["checksum"]
        if metadata["format"] != FORMAT or kind not in _KINDS or not _CHECKSUM.fullmatch(checksum):
            raise CorruptBlock("the file is not a block file of this version")
        meta = BlockMeta(
            kind=_KINDS[kind],
            name=metadata["name"],
            parent=metadata["parent"],
            tenant=metadata["tenant"],
            fingerprint=metadata["fingerprint"],
            rank=int(metadata["rank"]),
            token_ids=unpack_token_ids(base64.b64decode(metadata["token_ids"], validate=True)),
            group=metadata["group"],
            first_token=int(metadata["first_token"]),
        )
    except (KeyError, ValueError) as exc:
        raise CorruptBlock("the block's metadata is incomplete") from exc
    return meta, checksum
