"""Stored KV changed by somebody who knows the formats: bytes, then one after the other every checksum over them.

Manifests that vouch for whatever lies under their names are the one way to have other bytes served.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import xxhash

from kv_sidecar.format.block_file import parse_head
from kv_sidecar.format.ids import BlockKey
from kv_sidecar.format.manifest import all_keys, decode_manifest, encode_manifest
from kv_sidecar.format.safetensors_header import TensorHeader, decode_header, encode_header

_DIRECTORIES = {"block": "blocks", "tail": "tails"}


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
    beside = path.with_name(f".{path.name}.changed")
    beside.write_bytes(encode_header(changed) + bytes(tensor))
    beside.chmod(path.stat().st_mode & 0o777)
    beside.rename(path)


def vouch_for_what_lies_there(data_directory: Path) -> int:
    """Rewrite every manifest whose block files are there with the checksums these name; return how many changed.

    Only while no sidecar runs over the directory: it knows the checksums since its start.
    """
    changed = 0
    for path in sorted((data_directory / "manifests").glob("*/*.safetensors")):
        manifest = decode_manifest(path.read_bytes())
        files = [_path_of(data_directory, key) for key in all_keys(manifest)]
        if not all(file.exists() for file in files):
            continue
        checksums = tuple(parse_head(memoryview(file.read_bytes()))[1] for file in files)
        if checksums != manifest.block_checksums:
            path.write_bytes(encode_manifest(replace(manifest, block_checksums=checksums)))
            changed += 1
    return changed


def _path_of(data_directory: Path, key: BlockKey) -> Path:
    return data_directory / _DIRECTORIES[key.kind] / key.fan_out / key.file_name
