"""Which blocks this process has put into the shared store, by session: so that a turn asks for its own blocks alone.

Nothing here asks the store. As long as the manifest that was written last of a session is there, so are its trusted
blocks. Those in doubt are held anew before they are counted on: they are being written, nothing vouched for them while
the collector may have passed, or some left with a manifest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from contextcache.model import CacheRef, SessionId, TenantId

Session: TypeAlias = tuple[TenantId, SessionId]


@dataclass(slots=True)
class _Known:
    last: CacheRef = ""
    """The manifest that was written last; the first one that goes, whoever removes the session's KV."""
    blocks: dict[str, bool] = field(default_factory=dict)
    """Names of blocks, each with whether it is trusted."""


class KnownBlocks:
    """At most about `max_blocks` names; the session that was written longest ago is forgotten first."""

    def __init__(self, *, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._sessions: OrderedDict[Session, _Known] = OrderedDict()
        self._num_blocks = 0

    def __len__(self) -> int:
        return self._num_blocks

    @property
    def num_sessions(self) -> int:
        """Sessions of which a block is known."""
        return len(self._sessions)

    def last(self, session: Session) -> CacheRef:
        """Return the manifest that was written last, or nothing."""
        return known.last if (known := self._sessions.get(session)) else ""

    def names(self, session: Session) -> set[str]:
        """Return the names of all blocks, trusted or not."""
        return set(known.blocks) if (known := self._sessions.get(session)) else set()

    def is_trusted(self, session: Session, names: Iterable[str]) -> bool:
        """Return whether all these are trusted."""
        known = self._sessions.get(session)
        return known is not None and all(known.blocks.get(name) for name in names)

    def begin(self, session: Session, name: str) -> None:
        """Note a block that is about to be held: whatever comes now, a delete looks for it."""
        known = self._sessions.setdefault(session, _Known())
        self._sessions.move_to_end(session)
        self._num_blocks += name not in known.blocks
        known.blocks[name] = False
        while self._num_blocks > self._max_blocks and len(self._sessions) > 1:
            self.forget(next(iter(self._sessions)))

    def trust(self, session: Session, name: str) -> None:
        """Trust a block that was begun, unless it was let go of since."""
        known = self._sessions.get(session)
        if known is not None and name in known.blocks:
            known.blocks[name] = True

    def vouch(self, session: Session, cache_ref: CacheRef) -> None:
        """Note the manifest that was written last."""
        if (known := self._sessions.get(session)) is not None:
            known.last = cache_ref

    def doubt(self, session: Session) -> None:
        """Trust no block of a session any more, and no manifest."""
        if (known := self._sessions.get(session)) is not None:
            known.last = ""
            known.blocks = dict.fromkeys(known.blocks, False)

    def discard(self, session: Session, name: str) -> None:
        """Forget a block that is let go of."""
        known = self._sessions.get(session)
        if known is not None and name in known.blocks:
            del known.blocks[name]
            self._num_blocks -= 1
            if not known.blocks:
                del self._sessions[session]

    def forget(self, session: Session) -> None:
        """Forget all of a session."""
        if (known := self._sessions.pop(session, None)) is not None:
            self._num_blocks -= len(known.blocks)
