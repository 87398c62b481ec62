"""Digests of pages by numpy, as docs/project/formats.md defines them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def digests_of(planes: Sequence[int], pages: npt.NDArray[np.uint8], num_pages: int) -> tuple[int, ...]:
    """Return the digest of each page of a file; `planes`: their page sizes in bytes."""
    rows, start = list[npt.NDArray[np.uint8]](), 0
    for size in planes:
        own = pages[start : start + num_pages * size].reshape(num_pages, size)
        rows.append(np.pad(own, ((0, 0), (0, -size % 8))))
        start += num_pages * size
    words = np.ascontiguousarray(np.concatenate(rows, axis=1)).view("<u8")
    sums = np.einsum("ij,j->i", words ^ (words >> np.uint64(32)), odd_numbers(words.shape[1]))
    return tuple(sums.tolist())


def odd_numbers(count: int) -> npt.NDArray[np.uint64]:
    """Return SplitMix64 of 1 to `count`, with the lowest bit set, by Python's integers."""
    mask, found = (1 << 64) - 1, list[int]()
    for number in range(1, count + 1):
        value = number * 0x9E3779B97F4A7C15 & mask
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        found.append(value ^ value >> 31 | 1)
    return np.array(found, dtype=np.uint64)
