"""The digest of digest.py as one pass over the blocks, for Triton. Imported where a GPU is; tests interpret it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped]  # Triton has no types
import triton.language as tl  # type: ignore[import-untyped]  # as above

from vllm_plugin.connector.copies.digest import num_words, odd_numbers, page_digests

_WORDS_AT_ONCE = 4096
_WORD_BYTES = 8


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _add_digests(addresses, odd, found, num_words, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803  # Triton's language
    page = tl.program_id(0)
    source = tl.load(addresses + page).to(tl.pointer_type(tl.int64))
    sums = tl.zeros((WORDS,), dtype=tl.int64)
    for start in range(0, num_words, WORDS):
        place = start + tl.arange(0, WORDS)
        words = tl.load(source + place, mask=place < num_words, other=0)
        odds = tl.load(odd + place, mask=place < num_words, other=0)
        sums += (words ^ ((words >> 32) & 0xFFFFFFFF)) * odds
    tl.store(found + page, tl.load(found + page) + tl.sum(sums))


def page_digests_by_kernel(planes: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Return the digests of `page_digests`, which makes them where a page is not whole words in one stretch."""
    sizes = [plane[0].numel() for plane in planes]
    if not all(
        plane[0].is_contiguous() and not (size | plane.stride(0) | plane.data_ptr()) % _WORD_BYTES
        for plane, size in zip(planes, sizes, strict=True)
    ):
        return page_digests(planes, ids)
    odd, first = odd_numbers(num_words(planes), ids.device), 0
    found = torch.zeros_like(ids)
    for plane, size in zip(planes, sizes, strict=True):
        words = size // _WORD_BYTES
        addresses = ids * plane.stride(0) + plane.data_ptr()
        _add_digests[(len(ids),)](addresses, odd[first : first + words], found, words, WORDS=_WORDS_AT_ONCE)
        first += words
    return found
