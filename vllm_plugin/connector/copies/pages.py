"""Pages of KV: what they are to everybody, and what copies them. Knows no device, no sidecar and no request.

A *page* is the bytes of one engine block of one layer as they lie in memory, without padding and without what lies
between. It is opaque: the CPU backend packs tokens by instruction set inside a page, so a page is copied whole and
never sliced by token. Pages of k engine blocks travel flat: layer after layer of the group, of each its k pages.

Layers of different groups may be views of the same memory: their pages differ by block ids alone, so a page is named by
a layer and an id of that layer's group, and nothing is left out for having somebody else's address.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Pages: TypeAlias = npt.NDArray[np.uint8]
"""uint8 `[bytes]`: layer after layer of a group, of each the pages of k engine blocks."""
Fence: TypeAlias = Any
"""A point in the engine's stream of work after which its blocks may be read; None on the CPU, where it is now."""
Copied: TypeAlias = Callable[[Pages], object]

LOGICAL = "RHNC"
"""Axes of a page in vLLM's order: kernel block, kv head, token in kernel block, K then V content."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer's pages look like; part of the fingerprint."""

    name: str
    ratio: int
    """Kernel blocks in one engine block."""
    heads: int
    kernel_block_tokens: int
    content_bytes: int
    order: str = LOGICAL
    """The axes as they lie in memory, outermost first; those of length 1 where they are in the logical order."""
    dtype: str = ""
    """Of the numbers, as torch names it. Not in the fingerprint here: it follows from what is."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.ratio * self.heads * self.kernel_block_tokens * self.content_bytes


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Engine blocks of a group, and where their pages are outside of the engine."""

    group: int
    block_ids: Sequence[int]
    pages: Pages
    """Of `num_pages` engine blocks, as they are stored."""
    num_pages: int
    first_page: int = 0
    """The first of them that is copied, to or from the first of `block_ids`."""
    after: Fence = None
    """The blocks are not touched before that."""
    num_full: int = 0
    """The first so many pages have a token in every slot."""


class Stored(NamedTuple):
    """How pages are stored in a file."""

    size_bytes: int
    codec: str = ""
    """What the file says of it (docs/project/formats.md); empty: they are stored as they are."""


class PagedLayers(Protocol):
    """All KV layers of one rank, by group. Calls for disjoint block ids may run in different threads at once."""

    shapes: tuple[tuple[LayerShape, ...], ...]
    """Of each group."""

    def fence(self) -> Fence:
        """Mark, in the engine's thread, the point after which blocks named now may be read or overwritten."""
        ...

    def reach(self, memory: memoryview, *, owner: object) -> None:
        """Get ready to copy to and from this memory at full speed while `owner` lives. Never waits.

        Whoever has pages there copied holds `owner`. Raises RuntimeError when no thread can be had.
        """
        ...

    def stored(self, group: int, num_pages: int, num_full: int) -> Stored:  # noqa: ARG002  # plain pages are all alike
        """Return how so many pages are stored; the first `num_full` have a token in every slot."""
        return Stored(num_pages * page_bytes(self.shapes[group]))

    def gather(self, copy: PageCopy) -> None:
        """Copy blocks over their pages, which are in place on return."""
        ...

    def scatter(self, copy: PageCopy, *, copied: Copied = lambda _: None) -> None:
        """Copy pages over their blocks, which are in place on return.

        `copied` gets the bytes of all `num_pages`, a stretch at a time and in order, each after it was copied from:
        they are those that were copied, or were changed meanwhile.
        """
        ...


def page_bytes(shapes: Sequence[LayerShape]) -> int:
    """Return the bytes of one engine block in all layers of a group."""
    return sum(shape.page_bytes for shape in shapes)


def split(shapes: Sequence[LayerShape], pages: Pages, num_pages: int) -> Iterator[Pages]:
    """Yield each layer's part of flat pages, `[num_pages, page_bytes] u8`."""
    assert len(pages) == num_pages * page_bytes(shapes), "pages of all layers"
    start = 0
    for shape in shapes:
        end = start + num_pages * shape.page_bytes
        yield pages[start:end].reshape(num_pages, shape.page_bytes)
        start = end


def page_orders(shapes: Sequence[LayerShape]) -> dict[str, Any]:
    """Return what the fingerprint must say of the order of bytes in pages: nothing where it is the logical one."""
    orders = [shape.order for shape in shapes]
    return {} if set(orders) == {LOGICAL} else {"page_orders": orders}
