"""Digest of a page: 64 bits that a GPU makes of an engine block where it is, and compares with those of a save.

Words are the page's bytes of all planes as little-endian 64-bit numbers, each plane filled up with zeros to a word. A
word is folded, `w ^ (w >> 32)`, so that its top bit counts as much as any other. The digest is the sum of folded word
i * odd(i) modulo 2^64, where odd(i) is SplitMix64's i-th number with its lowest bit set. The order of summing is free.

A change of one word always changes the digest. Any other change goes unseen once in 2^31 cases or less often.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

_AT_ONCE_BYTES = 32 << 20
"""Bytes of one operation: torch makes a few copies of them."""


def page_digests(planes: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Return int64 `[ids]`, the digest of each block; planes are uint8 `[blocks, …]` on the device of `ids`."""
    found, first = torch.zeros(len(ids), dtype=torch.int64, device=ids.device), 0
    for plane in planes:
        size = plane[0].numel()
        odd = odd_numbers(num_words(planes), ids.device)[first : first + -(-size // 8)]
        first += len(odd)
        rows = max(_AT_ONCE_BYTES // size, 1)
        for start in range(0, len(ids), rows):
            taken = plane.index_select(0, ids[start : start + rows]).reshape(-1, size)
            words = torch.nn.functional.pad(taken, (0, -size % 8)).view(torch.int64)
            folded = words.bitwise_xor((words >> 32).bitwise_and_(0xFFFFFFFF))
            found[start : start + rows] += folded.mul_(odd).sum(1)
    return found


def num_words(planes: Sequence[torch.Tensor]) -> int:
    """Return the words of one block in all planes."""
    return sum(-(-plane[0].numel() // 8) for plane in planes)


@functools.lru_cache(maxsize=16)
def odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    """Return int64 `[count]`: SplitMix64 of 1, 2, 3 …, each with its lowest bit set."""
    with np.errstate(over="ignore"):
        value = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((value ^ (value >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(device)
