"""Where a turn's KV is when it comes to a pod, and when it is in the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.simulate.pods import Pod
from benchmarks.simulate.rates import BYTES_PER_TOKEN, Rates
from benchmarks.simulate.seen import Seen
from benchmarks.simulate.traffic import KINDS, Contexts
from gateway.pods.routing import Choice


class KV:
    """KV of all contexts, on all pods and in the store."""

    def __init__(
        self, rates: Rates, pods: Sequence[Pod], by_name: Mapping[str, int], contexts: Contexts, *, has_store: bool
    ) -> None:
        self._rates = rates
        self._pods = pods
        self._by_name = by_name
        self._contexts = contexts
        self._has_store = has_store

    def bring(
        self, seen: Seen, now_s: float, number: int, pod: Pod, choice: Choice, *, is_new: bool
    ) -> tuple[float, int]:
        """Return when what a turn can start from is there, and how many tokens that are not new have to be computed."""
        kind = KINDS[self._contexts.kind[number]]
        prefix = -1 - (self._contexts.kind[number] << 20 | self._contexts.prefix[number])
        own = self._contexts.own_tokens(number)
        if not is_new:
            where, known = pod.tier_of(number)
            from_s, found = self._restored(seen, now_s, pod, where, min(own, known), prefix, kind.prefix_tokens)
            if not where:
                where, from_s, found = self._fetched(seen, now_s, number, pod, own + kind.prefix_tokens)
                if where:
                    found -= kind.prefix_tokens
            if where:
                seen.restores[where] += 1
                pod.keep(prefix, kind.prefix_tokens)
                return from_s, max(0, own - found)
            seen.restores["recompute"] += 1
        where, known = pod.tier_of(prefix)
        if where:
            pod.keep(prefix, known)
            seen.prefixes[where] += is_new
            return self._restored(seen, now_s, pod, where, 0, prefix, known)[0], own if not is_new else 0
        peer = self._by_name.get(choice.prefix_at)
        if is_new and peer is not None and self._pull(seen, now_s, pod, self._pods[peer], prefix, kind.prefix_tokens):
            seen.prefixes["peer"] += 1
            pod.keep(prefix, kind.prefix_tokens)
            return self._wait_s(now_s, pod, kind.prefix_tokens), 0
        seen.prefixes["recompute"] += is_new
        pod.keep(prefix, kind.prefix_tokens)
        return now_s, kind.prefix_tokens + (own if not is_new else 0)

    def _restored(
        self, seen: Seen, now_s: float, pod: Pod, where: str, num_tokens: int, prefix: int, prefix_tokens: int
    ) -> tuple[float, int]:
        """Return when KV of this pod is in its engine. What begins it may be there already."""
        if where in ("", "device"):
            return now_s, num_tokens
        needed = num_tokens + (0 if prefix in pod.device.held else prefix_tokens)
        size_bytes = needed * BYTES_PER_TOKEN
        seen.moved_bytes[where] += size_bytes
        if where == "host":
            return now_s + size_bytes / self._rates.host_bytes_per_s, num_tokens
        return pod.take("disk", now_s, size_bytes / self._rates.disk_bytes_per_s), num_tokens

    def _fetched(self, seen: Seen, now_s: float, number: int, pod: Pod, num_tokens: int) -> tuple[str, float, int]:
        """Return where a context comes from that is not here, when it has come, and how much of it.

        From nowhere where that takes longer than a turn waits: it is computed, and here for the next.
        """
        holder = self._pods[self._contexts.holder[number]]
        source, known = "", 0
        if holder is not pod and holder.is_up and holder.tier_of(number)[0]:
            source, known = "peer", num_tokens
        elif self._has_store and KINDS[self._contexts.kind[number]].is_session:
            known = self._contexts.in_store[number] if self._contexts.in_store_at[number] <= now_s else 0
            source = "store" if known else ""
        if not source:
            return "", now_s, 0
        known = min(known, num_tokens)
        takes_s = known * BYTES_PER_TOKEN / self._rates.fetched_bytes_per_s
        if takes_s + pod.waits_s("fetch", now_s) > self._rates.pull_wait_s:
            seen.restores[f"{source}, too late"] += 1
            return "", now_s, 0
        seen.moved_bytes[source] += known * BYTES_PER_TOKEN
        return source, self._wait_s(now_s, pod, known), known

    def _pull(self, seen: Seen, now_s: float, pod: Pod, peer: Pod, prefix: int, num_tokens: int) -> bool:
        if not (peer.is_up and peer.tier_of(prefix)[0]):
            return False
        takes_s = num_tokens * BYTES_PER_TOKEN / self._rates.fetched_bytes_per_s
        if takes_s + pod.waits_s("fetch", now_s) > self._rates.pull_wait_s:
            return False
        seen.moved_bytes["peer"] += num_tokens * BYTES_PER_TOKEN
        return True

    def _wait_s(self, now_s: float, pod: Pod, num_tokens: int) -> float:
        return pod.take("fetch", now_s, num_tokens * BYTES_PER_TOKEN / self._rates.fetched_bytes_per_s)
