"""Where one block file belongs: its kind, name and rank, and the file name made of them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

BlockKind: TypeAlias = Literal["block", "tail"]
"""`block`: whole, content-addressed, shared. `tail`: what fills no block, private to its cache_ref."""

_FILE_NAME = re.compile(
    r"(?:(?P<block>[0-9a-f]{64})(?:\.(?P<group>[0-9a-f]{16}))?"
    r"|(?P<tail>ref_[0-9a-f]{32})(?:\.(?P<tail_group>[0-9a-f]{16})\.(?P<first>0|[1-9][0-9]{0,9}))?)"
    r"\.r(?P<rank>0|[1-9][0-9]{0,4})\.safetensors",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class BlockKey:
    """One rank's part of one block or tail."""

    kind: BlockKind
    name: str
    """Block id (64 hex digits), or the cache_ref for a tail."""
    rank: int
    group: str = ""
    """Digest of its group; empty: all layers of a plain engine."""
    first_token: int = 0
    """Of a tail with a group: a context may have several. 0 for everything else."""

    @property
    def file_name(self) -> str:
        """`<name>.r<rank>.safetensors`, with a group `<name>.<group>.r…`, a tail then `<name>.<group>.<first>.r…`."""
        group = f".{self.group}" if self.group else ""
        first = f".{self.first_token}" if self.group and self.kind == "tail" else ""
        return f"{self.name}{group}{first}.r{self.rank}.safetensors"

    @property
    def fan_out(self) -> str:
        """Two hex digits that spread files over 256 directories."""
        return fan_out(self.name)

    @classmethod
    def from_file_name(cls, file_name: str) -> BlockKey | None:
        """Return the key a file name stands for; None when it is not the name of a block file."""
        match = _FILE_NAME.fullmatch(file_name)
        if match is None:
            return None
        kind: BlockKind = "tail" if match["tail"] else "block"
        group = match["group"] or match["tail_group"] or ""
        return cls(kind, match["tail"] or match["block"], int(match["rank"]), group, int(match["first"] or 0))


def fan_out(name: str) -> str:
    """Return the first two hex digits of a block id or cache_ref."""
    return name.removeprefix("ref_")[:2]
