"""Stored KV changed by somebody who knows the formats: bytes, then one after the other every checksum over them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import xxhash

from kv_sidecar.block_key import BlockKey
from kv_sidecar.manifest import all_keys, decode_manifest, encode_manifest
from kv_sidecar.safetensors_header import TensorHeader, decode_header, encode_header
from tests.faults.files import StoredFiles


def change_bytes(path: Path, *, reseal: bool) -> None:
    """Change every value of a block file, by the upper mantissa of each float32; `reseal`: and its checksum."""
    whole = path.read_bytes()
    header, start = decode_header(memoryview(whole))
    tensor = bytearray(whole[start:])
    for position in range(2, len(tensor), 4):
        tensor[position] ^= 0x7F
    metadata = dict(header.metadata)
    if reseal:
        metadata["checksum"] = xxhash.xxh3_128_hexdigest(bytes(tensor))
    changed = TensorHeader(header.tensor, header.dtype, header.shape, metadata, header.supplement)
    _replace(path, encode_header(changed) + bytes(tensor))


def vouch_for_what_is_there(files: StoredFiles) -> None:
    """Rewrite every manifest so that it names the checksums the block files have now."""
    checksums = {}
    for path in (*files.on_disk("block"), *files.on_disk("tail")):
        header, _ = decode_header(memoryview(path.read_bytes()))
        checksums[BlockKey.from_file_name(path.name)] = header.metadata["checksum"]
    for path in files.on_disk("manifest"):
        manifest = decode_manifest(path.read_bytes())
        assert manifest.block_checksums, "this release's manifests vouch for their blocks"
        found = tuple(checksums[key] for key in all_keys(manifest))
        _replace(path, encode_manifest(replace(manifest, block_checksums=found)))


def _replace(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.forged")
    beside.write_bytes(data)
    beside.chmod(path.stat().st_mode & 0o777)
    beside.rename(path)
