"""Layers whose pages are stored in fewer bits: a copy moves between the engine's numbers and a file's codes.

Only pages with a token in every slot are coded: they never change again, so their numbers are coded once, however
often a context is restored and saved. The last page of a context is stored as it is until it is full; so are states,
whose error would grow with every token, and numbers that are not of a type that codec.py knows.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from typing_extensions import override

from contextcache.model import KVKind
from kv_sidecar.client import new_checksum
from vllm_plugin.connector.copies.codec import DTYPES, PageCodec, Rows
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
        found = {(codec.name, codec.group_numbers) for codecs in self._codecs for codec in codecs}
        return {"codec": sorted(found)} if found else {}

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
        facts |= {"name": codecs[0].name, "dtype": codecs[0].dtype, "group_numbers": codecs[0].group_numbers}
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
            for layer in self._parts(copy, room):
                layer.codec.encode(layer.pages[layer.coded_pages], layer.coded)
                layer.uncoded[:] = layer.pages[layer.uncoded_pages]
        return [()] * len(copies)

    @override
    def scatter(self, copies: Sequence[PageCopy], spent: Spent | None = None) -> list[Landed]:
        landed: list[Landed] = []
        for copy in copies:
            if not (self._codecs[copy.group] and copy.num_full):
                landed += self._layers.scatter([copy], spent)
                continue
            room, checksum = self._room(copy), new_checksum()
            for layer in self._parts(copy, room):
                layer.codec.decode(layer.coded, layer.pages[layer.coded_pages])
                layer.pages[layer.uncoded_pages] = layer.uncoded
                checksum.update(layer.stored)
            self._layers.scatter([replace(copy, pages=room, proof="")], spent)
            landed.append(Landed(checksum.hexdigest()))
        return landed

    def _parts(self, copy: PageCopy, room: Pages) -> Iterator[_LayerPart]:
        """Yield each layer's part of a copy: the pages that move."""
        full, start = copy.num_full, 0
        first, last = copy.first_page, copy.first_page + len(copy.block_ids)
        coded, uncoded = slice(min(first, full), min(last, full)), slice(max(first, full), max(last, full))
        rows = split(self.planes[copy.group], room, copy.num_pages)
        for codec, pages in zip(self._codecs[copy.group], rows, strict=True):
            middle = start + full * codec.coded_bytes
            end = middle + (copy.num_pages - full) * codec.page_bytes
            plain = copy.pages[middle:end].reshape(-1, codec.page_bytes)
            yield _LayerPart(
                codec=codec,
                pages=pages,
                stored=copy.pages[start:end],
                coded=copy.pages[start:middle].reshape(full, -1)[coded],
                coded_pages=coded,
                uncoded=plain[uncoded.start - full : uncoded.stop - full],
                uncoded_pages=uncoded,
            )
            start = end

    def _room(self, copy: PageCopy) -> Pages:
        """Return memory for uncoded pages, this thread's until its next call."""
        size_bytes = self._layers.stored(copy.group, copy.num_pages, 0).size_bytes
        if not hasattr(self._own, "room") or len(self._own.room) < size_bytes:
            self._own.room = np.empty(size_bytes, dtype=np.uint8)
        room: Pages = self._own.room[:size_bytes]
        return room


@dataclass(frozen=True, slots=True)
class _LayerPart:
    """One layer's pages in the engine's form and in the file's."""

    codec: PageCodec
    pages: Rows
    """`[pages, page_bytes]`"""
    stored: Pages
    """All of the layer's bytes in the file."""
    coded: Rows
    """Coded rows that move."""
    coded_pages: slice
    uncoded: Rows
    uncoded_pages: slice
