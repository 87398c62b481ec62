"""KV in fewer bits: the numbers of a page in groups of neighbours, each with its two ends and a code a number.

The *ends* of a group are its smallest and its largest number: the *near* one is nearer to zero (the smallest, if both
are as near), the other one is *far*. A number x has the code round((x - near) / (far - near) * steps), with 255 steps
(`q8`) or 15 (`q4`), and comes back as near + code * ((far - near) / steps), rounded to its type. The ends are kept in
that type, so they come back exactly, and a number between them has the same code the next time: numbers that were coded
once can be coded any number of times and stay as they are. The bytes are in docs/project/formats.md.

A page stays opaque: the codec knows neither meaning nor order of its numbers. Runs in transfer threads, on so few
numbers at a time that torch stays in the calling thread, and lets go of the interpreter's lock meanwhile.

Only pages with a token in every slot are coded: they never change again, so their numbers are coded once, however
often a context is restored and saved. The last page of a context is stored as it is until it is full. So are states,
whose error would grow with every token, and numbers of other types than `DTYPES`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from contextcache.model import KVKind
from kv_sidecar.client import new_checksum
from vllm_plugin.connector.copies.pages import (
    Fence,
    Landed,
    LayerShape,
    PageCopy,
    PagedLayers,
    Pages,
    Spent,
    Stored,
    split,
)

Rows: TypeAlias = npt.NDArray[np.uint8]
"""`[pages, bytes] u8`"""
Ends: TypeAlias = npt.NDArray[np.floating]
"""`[pages, groups]`, in the type that is computed in."""

STEPS = {"q8": 255, "q4": 15}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""Types of a page's numbers."""
GROUP_NUMBERS = 64
"""32: a tenth more bytes; 128: a quarter more error."""
TINY = 2.0**-100
"""Smallest width of a group: the factor of a smaller one would overflow, so its numbers come back as its near end."""
_AT_ONCE = 32_768
"""Numbers of one operation. With more torch would call other threads, whose cores are the engine's."""


class NotFinite(Exception):  # a finding about KV, not a fault
    """There is a number that has no code: an infinite one, none at all, or one too far from its neighbours."""


@dataclass(frozen=True, slots=True)
class PageCodec:
    """How one layer's pages are coded."""

    name: str
    dtype: str
    page_bytes: int
    group_numbers: int = GROUP_NUMBERS
    """Numbers of a group; the benchmark of codecs compares sizes."""

    @property
    def coded_bytes(self) -> int:
        """Bytes of a coded page: near and far ends of all groups, then all codes."""
        return self._ends_bytes + sum(groups * self._code_bytes(size) for groups, size in self._parts)

    def encode(self, pages: Rows, coded: Rows) -> None:
        """Code whole pages into rows of `coded_bytes`. Raises NotFinite; then the rows have no meaning."""
        room = torch.empty(_AT_ONCE, dtype=self._computed)
        for numbers, ends, codes in self._stretches(pages, coded):
            values = room[: numbers.numel()].view(numbers.shape).copy_(numbers)
            near, far = _ends(values)
            with np.errstate(invalid="ignore", over="ignore"):
                width = far - near
            if not np.isfinite(width).all():
                raise NotFinite
            scale = np.divide(STEPS[self.name], width, out=np.zeros_like(width), where=abs(width) > TINY)
            values.sub_(_column(near)).mul_(_column(scale))
            np.rint(values.numpy(), out=values.numpy())  # torch's calls threads for far fewer numbers
            kept = torch.from_numpy(np.stack([near, far], axis=2)).to(self._dtype)
            np.copyto(ends, kept.view(torch.uint8).numpy().reshape(ends.shape))
            if self.name == "q4":
                low, high = _halves(values)
                values = torch.add(low, high, alpha=16, out=low)
            np.copyto(codes, values.numpy(), casting="unsafe")

    def decode(self, coded: Rows, pages: Rows) -> None:
        """Bring whole pages back; `coded` may be read-only."""
        room = torch.empty(_AT_ONCE, dtype=self._computed)
        for numbers, ends, codes in self._stretches(pages, coded):
            values = room[: numbers.numel()].view(numbers.shape)
            if self.name == "q8":
                np.copyto(values.numpy(), codes)
            else:
                into, half = values.numpy(), codes.shape[2]
                np.copyto(into[..., :half], codes & 15)
                np.copyto(into[..., half:], codes[..., : into.shape[2] - half] >> 4)
            kept = torch.from_numpy(ends.copy()).view(self._dtype).to(self._computed)
            near, far = kept.view(*values.shape[:2], 2, 1).unbind(2)
            numbers.copy_(values.mul_((far - near) / STEPS[self.name]).add_(near))

    @property
    def _dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def _computed(self) -> torch.dtype:
        """The type that is computed in: the ends have to come back exactly."""
        return torch.float64 if self.dtype == "float32" else torch.float32

    @property
    def _parts(self) -> tuple[tuple[int, int], ...]:
        """Groups and the numbers of each: the last group of a page may have fewer."""
        whole, rest = divmod(self.page_bytes // self._dtype.itemsize, self.group_numbers)
        return tuple((groups, size) for groups, size in ((whole, self.group_numbers), (1, rest)) if groups * size)

    @property
    def _ends_bytes(self) -> int:
        return sum(2 * groups * self._dtype.itemsize for groups, _ in self._parts)

    def _code_bytes(self, size: int) -> int:
        return size if self.name == "q8" else -(-size // 2)

    def _stretches(self, pages: Rows, coded: Rows) -> Iterator[tuple[torch.Tensor, Rows, Rows]]:
        """Yield stretches that are coded at once: numbers `[pages, groups, size]`, their ends and their codes."""
        item_bytes = self._dtype.itemsize
        end, code, number = 0, self._ends_bytes, 0
        for num_groups, size in self._parts:
            at_once = -(-num_groups // -(-num_groups * size // _AT_ONCE))
            for first in range(0, num_groups, at_once):
                groups = min(num_groups - first, at_once)
                ends, end = coded[:, end : end + 2 * groups * item_bytes], end + 2 * groups * item_bytes
                code_bytes = groups * self._code_bytes(size)
                codes, code = coded[:, code : code + code_bytes], code + code_bytes
                part = pages[:, number * item_bytes : (number + groups * size) * item_bytes]
                number += groups * size
                rows = max(_AT_ONCE // (groups * size), 1)
                for row in range(0, len(pages), rows):
                    own = slice(row, row + rows)
                    numbers = torch.from_numpy(part[own].reshape(-1, groups, size * item_bytes)).view(self._dtype)
                    yield numbers, ends[own], codes[own].reshape(-1, groups, self._code_bytes(size))


def _ends(values: torch.Tensor) -> tuple[Ends, Ends]:
    """Return near and far ends of `[pages, groups, size]`; of a group with a NaN, NaNs."""
    low, high = _halves(values, pad_with=values[..., :1])
    # Half as many: a reduction calls threads sooner than the rest.
    smallest, largest = torch.minimum(low, high).amin(2).numpy(), torch.maximum(low, high).amax(2).numpy()
    is_near = abs(smallest) <= abs(largest)
    return np.where(is_near, smallest, largest), np.where(is_near, largest, smallest)


def _halves(values: torch.Tensor, pad_with: torch.Tensor | float = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the halves of each group; where it has an odd number, one more comes to the second half."""
    if values.shape[2] % 2:
        values = torch.cat([values, torch.as_tensor(pad_with, dtype=values.dtype).expand(*values.shape[:2], 1)], dim=2)
    low, high = values.chunk(2, dim=2)
    return low, high


def _column(ends: Ends) -> torch.Tensor:
    return torch.from_numpy(ends).unsqueeze(2)


class CodedLayers(PagedLayers):
    """Other layers, and how each group's pages are coded."""

    def __init__(self, layers: PagedLayers, kinds: Sequence[KVKind], name: str) -> None:
        """`kinds` of the groups; `name`: of the codec."""
        self._layers = layers
        self.shapes, self.planes = layers.shapes, layers.planes
        self.uncoded: list[str] = []
        """Reasons for groups without a codec, each a short fixed phrase."""
        groups = zip(kinds, layers.shapes, layers.planes, strict=True)
        self._codecs = [self._codecs_of(kind, own, planes, name) for kind, own, planes in groups]
        self._own = threading.local()

    def _codecs_of(
        self, kind: KVKind, shapes: Sequence[LayerShape], planes: Sequence[int], name: str
    ) -> list[PageCodec]:
        dtypes = {shape.dtype for shape in shapes}
        if reason := "state" if kind == "state" else "" if len(dtypes) == 1 and dtypes <= DTYPES.keys() else "dtype":
            self.uncoded.append(reason)
            return []
        return [PageCodec(name, shapes[0].dtype, size) for size in planes]

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the fingerprint; none where nothing is coded."""
        names = {codec.name for codecs in self._codecs for codec in codecs}
        return {"codec": [(name, GROUP_NUMBERS) for name in names]} if names else {}

    @override
    def fence(self) -> Fence:
        return self._layers.fence()

    @override
    def reach(self, memory: memoryview, *, owner: object) -> None:
        self._layers.reach(memory, owner=owner)

    @override
    def stored(self, group: int, num_pages: int, num_full: int) -> Stored:
        plain, codecs = self._layers.stored(group, num_pages, num_full), self._codecs[group]
        if not (codecs and num_full):
            return plain
        saved = sum(codec.page_bytes - codec.coded_bytes for codec in codecs)
        alike = [[page_bytes, len(list(same))] for page_bytes, same in groupby(codec.page_bytes for codec in codecs)]
        facts = {"coded_pages": num_full, "pages": num_pages, "layers": alike}
        facts |= {"name": codecs[0].name, "dtype": codecs[0].dtype, "group_numbers": GROUP_NUMBERS}
        told = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return Stored(plain.size_bytes - num_full * saved, told)

    @override
    def gather(self, copies: Sequence[PageCopy]) -> list[tuple[int, ...]]:
        """Raise NotFinite when there is a number that cannot be coded."""
        for copy in copies:
            if not (self._codecs[copy.group] and copy.num_full):
                self._layers.gather([copy])
                continue
            room = self._room(copy)
            self._layers.gather([replace(copy, pages=room)])
            for codec, _, (coded, numbers), (uncoded, plain) in self._parts(copy, room):
                codec.encode(numbers, coded)
                uncoded[:] = plain
        return [()] * len(copies)

    @override
    def scatter(self, copies: Sequence[PageCopy], spent: Spent | None = None) -> list[Landed]:
        landed: list[Landed] = []
        for copy in copies:
            if not (self._codecs[copy.group] and copy.num_full):
                landed += self._layers.scatter([copy], spent)
                continue
            room, checksum = self._room(copy), new_checksum()
            for codec, stored, (coded, numbers), (uncoded, plain) in self._parts(copy, room):
                codec.decode(coded, numbers)
                plain[:] = uncoded
                checksum.update(stored)
            self._layers.scatter([replace(copy, pages=room, proof="")], spent)
            landed.append(Landed(checksum.hexdigest()))
        return landed

    def _parts(
        self, copy: PageCopy, room: Pages
    ) -> Iterator[tuple[PageCodec, Pages, tuple[Rows, Rows], tuple[Rows, Rows]]]:
        """Yield each layer's bytes in the file, and the pages that move, in the file and here."""
        full, start = copy.num_full, 0
        first, last = copy.first_page, copy.first_page + len(copy.block_ids)
        edge = min(max(first, full), last)
        rows = split(self.planes[copy.group], room, copy.num_pages)
        for codec, pages in zip(self._codecs[copy.group], rows, strict=True):
            middle = start + full * codec.coded_bytes
            end = middle + (copy.num_pages - full) * codec.page_bytes
            coded = copy.pages[start:middle].reshape(full, -1)[first:edge]
            uncoded = copy.pages[middle:end].reshape(-1, codec.page_bytes)[max(edge - full, 0) : max(last - full, 0)]
            yield codec, copy.pages[start:end], (coded, pages[first:edge]), (uncoded, pages[edge:last])
            start = end

    def _room(self, copy: PageCopy) -> Pages:
        """Return memory for uncoded pages, this thread's until its next call."""
        size_bytes = self._layers.stored(copy.group, copy.num_pages, 0).size_bytes
        if not hasattr(self._own, "room") or len(self._own.room) < size_bytes:
            self._own.room = np.empty(size_bytes, dtype=np.uint8)
        room: Pages = self._own.room[:size_bytes]
        return room
