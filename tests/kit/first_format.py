"""Stored KV as releases wrote it that knew no groups: the bytes of format 1, which is read and never written."""

from __future__ import annotations

import base64

import numpy as np
import numpy.typing as npt
import xxhash

from contextcache.model import Manifest
from kv_sidecar.format.block_file import BlockMeta
from kv_sidecar.format.ids import pack_token_ids
from kv_sidecar.format.manifest import manifest_checksum
from kv_sidecar.format.safetensors_header import TensorHeader, encode_header


def manifest_metadata(manifest: Manifest, *, block_ids: str | None = None) -> dict[str, str]:
    """Return what a manifest of one plain group said, its checksum not included; `block_ids`: what it said of those."""
    (group,) = manifest.groups
    blocks = " ".join(file.name for file in manifest.files if file.kind == "block")
    return {
        "format": "context-cache-manifest-1",
        "cache_ref": manifest.cache_ref,
        "tenant": manifest.tenant,
        "session_id": manifest.session_id,
        "fingerprint": manifest.fingerprint,
        "block_tokens": str(group.block_tokens),
        "block_ids": blocks if block_ids is None else block_ids,
        "world_size": str(manifest.world_size),
        "expires_at_ms": str(manifest.expires_at_ms),
        "size_bytes": str(manifest.size_bytes),
    }


def manifest_file(manifest: Manifest, *, block_ids: str | None = None) -> bytes:
    """Return the file of a manifest, with a supplement when it vouches for its files."""
    tensor = pack_token_ids(manifest.token_ids)
    metadata = manifest_metadata(manifest, block_ids=block_ids)
    metadata["checksum"] = manifest_checksum(metadata, tensor)
    supplement = {"block_checksums": " ".join(manifest.block_checksums)} if manifest.block_checksums else {}
    if supplement:
        supplement["checksum"] = manifest_checksum(supplement, metadata["checksum"].encode())
    return encode_header(TensorHeader("token_ids", "U32", (len(manifest.token_ids),), metadata, supplement)) + tensor


def block_file(meta: BlockMeta, pages: npt.NDArray[np.uint8]) -> bytes:
    """Return a block file; `pages`: of layers, engine blocks and bytes of a page."""
    layers, engine_blocks, page_bytes = pages.shape
    tensor = pages.tobytes()
    metadata = {
        "format": "context-cache-block-1",
        "kind": meta.kind,
        "name": meta.name,
        "parent": meta.parent,
        "tenant": meta.tenant,
        "fingerprint": meta.fingerprint,
        "rank": str(meta.rank),
        "token_ids": base64.b64encode(pack_token_ids(meta.token_ids)).decode(),
        "checksum": xxhash.xxh3_128_hexdigest(tensor),
    }
    return encode_header(TensorHeader("pages", "U8", (layers, engine_blocks, page_bytes), metadata)) + tensor
