"""Names of blocks: a SHA-256 chain over fingerprint, tenant and token ids. Pure; the bytes are in docs/formats.md.

A block's id says which tokens it holds *and* which came before them, so two contexts of one tenant that start
alike share their first blocks, and no block can be taken for another's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

DOMAIN = b"context-cache block 1\n"
"""First bytes hashed: another version of the chain starts with other bytes."""
_MAX_TOKEN_ID = 2**32 - 1


def block_id(fingerprint: str, tenant: str, parent: str, token_ids: Sequence[int]) -> str:
    """Return the id (64 hex digits) of the block that holds `token_ids` after the block `parent` ("" for the first).

    Raises OverflowError for a token id outside 0 to 2**32 - 1.
    """
    digest = hashlib.sha256(DOMAIN)
    for text in (fingerprint, tenant, parent):
        raw = text.encode()
        digest.update(len(raw).to_bytes(4, "little"))
        digest.update(raw)
    digest.update(len(token_ids).to_bytes(4, "little"))
    digest.update(pack_token_ids(token_ids))
    return digest.hexdigest()


def chain_block_ids(fingerprint: str, tenant: str, token_ids: Sequence[int], *, block_tokens: int) -> tuple[str, ...]:
    """Return the ids of all whole blocks of a context, in order; tokens after the last one have no block id."""
    ids: list[str] = []
    edges = range(0, len(token_ids) + 1, block_tokens)
    for start, end in pairwise(edges):
        parent = ids[-1] if ids else ""
        ids.append(block_id(fingerprint, tenant, parent, token_ids[start:end]))
    return tuple(ids)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Return token ids as unsigned 32-bit little-endian integers. Raises OverflowError when one does not fit."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) > _MAX_TOKEN_ID):
        raise OverflowError("a token id does not fit 32 bits")
    return np.array(token_ids, dtype="<u4").tobytes()


def unpack_token_ids(raw: bytes) -> tuple[int, ...]:
    """Return what `pack_token_ids` packed. Raises ValueError when the length is not a multiple of 4."""
    return tuple(np.frombuffer(raw, dtype="<u4").tolist())
