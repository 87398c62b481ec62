"""KV in fewer bits: the numbers of a page in groups of neighbours, each with its two ends and a code a number.

The *ends* of a group are its smallest and its largest number: the *near* one is nearer to zero (the smallest, if both
are as near), the other one is *far*. A number x has the code round((x - near) / (far - near) * steps), with 255 steps
(`q8`) or 15 (`q4`), and comes back as near + code * ((far - near) / steps), rounded to its type. The ends are kept in
that type, so they come back exactly, and a number between them has the same code the next time: numbers that were coded
once can be coded any number of times and stay as they are. The bytes are in docs/project/formats.md.

A page stays opaque: the codec knows neither meaning nor order of its numbers. Runs in transfer threads, on so few
numbers at a time that torch stays in the calling thread, and lets go of the interpreter's lock meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

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
