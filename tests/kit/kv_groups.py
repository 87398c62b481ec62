"""Contexts with any groups that an engine may have, for tests with many of them."""

from __future__ import annotations

from typing import get_args

from hypothesis import strategies as st

from contextcache.model import KVGroup, KVKind, plain_group
from kv_sidecar.format.manifest import MAX_RUNS


def digest_of(number: int) -> str:
    return f"{number:016x}"


@st.composite
def some_runs(draw: st.DrawFn, num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Up to four runs, of which the last ends with the context."""
    count = draw(st.integers(1, min(MAX_RUNS, (num_tokens + 1) // 2)))
    inner = draw(st.sets(st.integers(0, num_tokens - 1), min_size=2 * count - 1, max_size=2 * count - 1))
    edges = [*sorted(inner), num_tokens]
    return tuple(zip(edges[::2], edges[1::2], strict=True))


@st.composite
def one_group(draw: st.DrawFn, num_tokens: int, digest: str) -> KVGroup:
    kind: KVKind = draw(st.sampled_from(get_args(KVKind)))
    runs = ((0, num_tokens),) if kind == "full_attention" else draw(some_runs(num_tokens))
    window = draw(st.integers(1, 50)) if kind == "sliding_window" else 0
    return KVGroup(kind, draw(st.integers(1, 9)), runs, window, digest)


@st.composite
def some_groups(draw: st.DrawFn, num_tokens: int) -> tuple[KVGroup, ...]:
    """The groups of an engine: one without a digest, or some with."""
    count = draw(st.integers(0, 4))
    if not count:
        return (plain_group(num_tokens, draw(st.integers(1, 9))),)
    return tuple(draw(one_group(num_tokens, digest_of(number))) for number in range(count))


@st.composite
def some_contexts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[KVGroup, ...]]:
    """The tokens of a context and its groups."""
    token_ids = tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40)))
    return token_ids, draw(some_groups(len(token_ids)))
