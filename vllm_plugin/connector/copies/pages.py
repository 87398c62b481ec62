"""Pages of KV, and the protocol of the parts that copy them. Knows no device, no sidecar and no request.

A *page* is the bytes of one engine block of one plane as they lie in memory, without padding. A *plane* is one layer,
or all layers of a group where vLLM puts them side by side in each block. A page is opaque: the CPU backend packs tokens
by instruction set inside it, so it is copied whole and never sliced by token. Pages of k engine blocks travel flat:
plane after plane of the group, of each its k pages.

Layers of different groups may be views of the same memory. Their pages differ by block ids alone, so a layer and an id
of that layer's group name a page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Pages: TypeAlias = npt.NDArray[np.uint8]
"""uint8 `[bytes]`: plane after plane of a group, of each the pages of k engine blocks."""
Fence: TypeAlias = Any
"""Point in the engine's stream of work after which its blocks may be read; None on the CPU, where it is now."""
Proof: TypeAlias = Literal["", "checksum", "digests"]
"""Comparison that shows which bytes a load has copied: none, of the file's bytes, or of the engine's blocks."""

LOGICAL = "RHNC"
"""Axes of a page in vLLM's order: kernel block, kv head, token in kernel block, K then V content."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer's pages; part of the fingerprint."""

    name: str
    ratio: int
    """Kernel blocks in one engine block."""
    heads: int
    kernel_block_tokens: int
    content_bytes: int
    order: str = LOGICAL
    """The axes as they lie in memory, outermost first; those of length 1 where they are in the logical order."""
    dtype: str = ""
    """Type of the numbers, as torch names it. The fingerprint has it elsewhere."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.ratio * self.heads * self.kernel_block_tokens * self.content_bytes


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Engine blocks of a group, and the pages of one file."""

    group: int
    block_ids: Sequence[int]
    pages: Pages
    """Pages of `num_pages` engine blocks, as they are stored."""
    num_pages: int
    first_page: int = 0
    """Page that belongs to the first of `block_ids`."""
    after: Fence = None
    """Point before which the blocks are not touched. All copies of one call have the same."""
    num_full: int = 0
    """Leading pages with a token in every slot."""
    proof: Proof = ""
    """Proof that a load returns."""


class Stored(NamedTuple):
    """Form of pages in a file."""

    size_bytes: int
    codec: str = ""
    """Codec as the file names it (docs/project/formats.md); empty: bytes as the engine has them."""


class Landed(NamedTuple):
    """Proof of one copied file."""

    checksum: str = ""
    """Checksum of all pages of the file, made after the copy; empty unless the copy asks for it."""
    digests: tuple[int, ...] = ()
    """Digest of each engine block that was copied; empty unless the copy asks for them."""


@dataclass(slots=True)
class Spent:
    """Seconds of the steps of a load."""

    submit_s: float = 0.0
    """Finding addresses and giving them to the driver."""
    gil_s: float = 0.0
    """Part of `submit_s` in which the thread had no core or no interpreter lock."""
    copy_s: float = 0.0
    """Copying on the CPU; on a GPU waiting for the copies and digests."""
    verify_s: float = 0.0
    """Reading bytes on the CPU for a checksum."""


class PagedLayers(Protocol):
    """All KV layers of one rank, by group. Calls for disjoint block ids may run in different threads at once."""

    shapes: tuple[tuple[LayerShape, ...], ...]
    """Layers of each group."""
    planes: tuple[tuple[int, ...], ...]
    """Page sizes in bytes, by group. A plane is a layer, or all layers of a group that lie side by side in a block."""
    files_at_once: int = 1
    """Files that go best in one call: a GPU takes all, a core takes one."""
    makes_digests: bool = False
    """Whether `gather` returns digests, and `scatter` can."""

    def fence(self) -> Fence:
        """Mark, in the engine's thread, the point after which blocks named now may be read or overwritten."""
        return None

    def reach(self, memory: memoryview, *, owner: object) -> None:  # noqa: ARG002  # a CPU reaches all memory
        """Prepare copies to and from this memory at full speed while `owner` lives. Never waits.

        A thread that copies pages there holds `owner`. Raises RuntimeError when no thread can be started.
        """
        return

    def stored(self, group: int, num_pages: int, num_full: int) -> Stored:  # noqa: ARG002  # plain pages are all alike
        """Return the form of so many pages; the first `num_full` have a token in every slot."""
        return Stored(num_pages * sum(self.planes[group]))

    def gather(self, copies: Sequence[PageCopy]) -> list[tuple[int, ...]]:
        """Copy blocks over their pages, which are in place on return; return each file's digests, if there are any."""
        ...

    def scatter(self, copies: Sequence[PageCopy], spent: Spent | None = None) -> list[Landed]:
        """Copy pages over their blocks, which are in place on return; return the proofs that the copies ask for."""
        ...


def page_bytes(shapes: Sequence[LayerShape]) -> int:
    """Return the bytes of one engine block in all layers of a group."""
    return sum(shape.page_bytes for shape in shapes)


def split(planes: Sequence[int], pages: Pages, num_pages: int) -> Iterator[Pages]:
    """Yield each plane's part of flat pages, `[num_pages, plane's page bytes] u8`."""
    assert len(pages) == num_pages * sum(planes), "pages of all planes"
    start = 0
    for size in planes:
        end = start + num_pages * size
        yield pages[start:end].reshape(num_pages, size)
        start = end


def page_orders(layers: PagedLayers) -> dict[str, Any]:
    """Return the fingerprint's facts about the order of bytes in pages: none where it is layer by layer and logical."""
    orders = [shape.order for own in layers.shapes for shape in own]
    facts: dict[str, Any] = {} if set(orders) == {LOGICAL} else {"page_orders": orders}
    is_by_layer = all(len(own) == len(sizes) for own, sizes in zip(layers.shapes, layers.planes, strict=True))
    return facts if is_by_layer else facts | {"planes": layers.planes}
