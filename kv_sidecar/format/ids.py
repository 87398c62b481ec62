"""Names of KV: block ids, names of block files, fingerprints. Pure; the bytes are in docs/project/formats.md.

A block's id is a SHA-256 chain over fingerprint, tenant and token ids. It identifies the block's tokens and all tokens
before them. So two contexts of one tenant that start alike share their first blocks, and no block has another's id. KV
of one fingerprint is garbage under any other. The engine computes fingerprints (hex SHA-256 of canonical JSON). This
module compares them and names their differences for people.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from contextcache.errors import FingerprintMismatch, InvalidRequest

BlockKind: TypeAlias = Literal["block", "tail"]
"""`block`: whole, content-addressed, shared. `tail`: tokens that fill no block, private to its cache_ref."""

_FILE_NAME = re.compile(
    r"(?:(?P<block>[0-9a-f]{64})(?:\.(?P<group>[0-9a-f]{16}))?"
    r"|(?P<tail>ref_[0-9a-f]{32})(?:\.(?P<tail_group>[0-9a-f]{16})\.(?P<first>0|[1-9][0-9]{0,9}))?)"
    r"\.r(?P<rank>0|[1-9][0-9]{0,4})\.safetensors",
    re.ASCII,
)


class BlockKey(NamedTuple):
    """One rank's part of one block or tail."""

    kind: BlockKind
    name: str
    """Block id (64 hex digits), or the cache_ref for a tail."""
    rank: int
    group: str = ""
    """Digest of its group; empty: all layers of a plain engine."""
    first_token: int = 0
    """First token of a tail with a group: a context may have several. 0 for every other file."""

    @property
    def file_name(self) -> str:
        """`<name>.r<rank>.safetensors`, with a group `<name>.<group>.r…`, a tail then `<name>.<group>.<first>.r…`."""
        group = f".{self.group}" if self.group else ""
        first = f".{self.first_token}" if self.group and self.kind == "tail" else ""
        return f"{self.name}{group}{first}.r{self.rank}.safetensors"

    @property
    def fan_out(self) -> str:
        """Two hex digits that spread files over 256 directories."""
        return fan_out(self.name)

    @classmethod
    def from_file_name(cls, file_name: str) -> BlockKey | None:
        """Return the key a file name stands for; None when it is not the name of a block file."""
        match = _FILE_NAME.fullmatch(file_name)
        if match is None:
            return None
        kind: BlockKind = "tail" if match["tail"] else "block"
        group = match["group"] or match["tail_group"] or ""
        return cls(kind, match["tail"] or match["block"], int(match["rank"]), group, int(match["first"] or 0))


def fan_out(name: str) -> str:
    """Return the first two hex digits of a block id or cache_ref."""
    return name.removeprefix("ref_")[:2]


DOMAIN = b"context-cache block 1\n"
"""First bytes hashed: another version of the chain starts with other bytes."""
TOKEN_BYTES = 4
"""Bytes of a packed token id."""


def block_id(fingerprint: str, tenant: str, parent: str, token_ids: Sequence[int]) -> str:
    """Return the id (64 hex digits) of the block that holds `token_ids` after the block `parent` ("" for the first).

    Raises OverflowError for a token id outside 0 to 2**32 - 1.
    """
    return _block_id(fingerprint, tenant, parent, pack_token_ids(token_ids))


def _block_id(fingerprint: str, tenant: str, parent: str, packed: bytes) -> str:
    digest = hashlib.sha256(DOMAIN)
    for text in (fingerprint, tenant, parent):
        raw = text.encode()
        digest.update(len(raw).to_bytes(4, "little"))
        digest.update(raw)
    digest.update((len(packed) // TOKEN_BYTES).to_bytes(4, "little"))
    digest.update(packed)
    return digest.hexdigest()


def chain_block_ids(fingerprint: str, tenant: str, token_ids: Sequence[int], *, block_tokens: int) -> tuple[str, ...]:
    """Return the ids of all whole blocks of a context, in order; tokens after the last one have no block id."""
    return chain_packed(fingerprint, tenant, pack_token_ids(token_ids), block_tokens=block_tokens)


def chain_packed(
    fingerprint: str, tenant: str, packed: bytes, *, block_tokens: int, parent: str = ""
) -> tuple[str, ...]:
    """As `chain_block_ids`, of packed token ids. `parent`: id of the block before them; empty: they are the first."""
    ids: list[str] = []
    for start, end in pairwise(range(0, len(packed) + 1, block_tokens * TOKEN_BYTES)):
        ids.append(_block_id(fingerprint, tenant, ids[-1] if ids else parent, packed[start:end]))
    return tuple(ids)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as unsigned 32-bit little-endian integers. Raises OverflowError when one does not fit."""
    ids = array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpack_token_ids(raw: bytes) -> tuple[int, ...]:
    """Return packed token ids. Raises ValueError when the length is not a multiple of 4."""
    return tuple(np.frombuffer(raw, dtype="<u4").tolist())


MAX_FINGERPRINT_CHARS = 128
ADAPTER_MARK = "+"
"""Mark in a fingerprint, between the engine's own and the hash of the LoRA adapter's content."""


def check_fingerprint(fingerprint: str, fingerprint_json: str) -> None:
    """Raise InvalidRequest unless `fingerprint` is the hex SHA-256 of `fingerprint_json` (not checked when empty)."""
    check_fingerprint_text(fingerprint)
    if fingerprint_json and hashlib.sha256(fingerprint_json.encode()).hexdigest() != fingerprint:
        raise InvalidRequest("the fingerprint must be the SHA-256 of its JSON", param="fingerprint")


def check_fingerprint_text(fingerprint: str) -> None:
    """Raise InvalidRequest for a fingerprint that is empty or too long."""
    if not 0 < len(fingerprint) <= MAX_FINGERPRINT_CHARS:
        raise InvalidRequest("a fingerprint must have 1 to 128 characters", param="fingerprint")


def engine_fingerprint(fingerprint: str) -> str:
    """Return the part of a fingerprint that is the engine's own, whatever the adapter."""
    return fingerprint.partition(ADAPTER_MARK)[0]


def require_fingerprint(asked: str, stored: str) -> None:
    """Raise FingerprintMismatch unless an engine with `asked` may inject KV stored under `stored`."""
    if asked != stored:
        raise FingerprintMismatch("the KV has a different fingerprint")


def differences(before_json: str, after_json: str) -> list[str]:
    """Return the top-level keys whose values differ, sorted; `["?"]` when either text is no JSON object."""
    before, after = _document(before_json), _document(after_json)
    if before is None or after is None:
        return ["?"]
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def _document(text: str) -> dict[str, Any] | None:
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None
