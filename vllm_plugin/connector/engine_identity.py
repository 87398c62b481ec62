"""The fingerprint an engine's KV goes under now: learned from its ranks, moved when its weights may have changed.

Lives in the scheduler's half, which alone decides it; workers adopt what they are told. A moved fingerprint holds a
random epoch: KV made under it is never mixed up with any other, and dies with the engine. After a restart the weights
are those of the files again, and so is the fingerprint. Pure.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import replace

from vllm_plugin.connector.fingerprint import canonical_json, fingerprint
from vllm_plugin.connector.metadata import RankFacts

_WEIGHTS = "weights"
_EPOCH = "weights_epoch"


class EngineIdentity:
    """Not thread-safe: the engine's thread alone."""

    def __init__(self) -> None:
        self.facts: RankFacts | None = None
        """None: the ranks are not known, or do not agree. Then nothing is loaded or saved."""
        self.are_weights_known = True
        self._first_epoch = ""
        self._news = ""

    def learn(self, ranks: Iterable[RankFacts]) -> bool:
        """Take what the workers are; return whether they agree.

        Weights that one of them could not look into are new weights: the epoch moves.
        """
        known = list(ranks)
        documents = [json.loads(rank.fingerprint_json) for rank in known]
        weights = {document.pop(_WEIGHTS, None) for document in documents}
        self.are_weights_known = None not in weights
        agree = bool(known) and len({canonical_json(document) for document in documents}) == 1
        if not agree or len(weights - {None}) > 1:
            self.facts = None
            return False
        self.facts, self._first_epoch = known[0], documents[0].get(_EPOCH, "")
        if not self.are_weights_known:
            self.move()
        return True

    def move(self) -> None:
        """Let nothing that was saved before be loaded, by a fingerprint nobody has."""
        if self.facts is None:
            return
        document = json.loads(self.facts.fingerprint_json)
        document[_EPOCH] = f"{self._first_epoch}/{secrets.token_hex(16)}"
        if not self.are_weights_known:
            document[_WEIGHTS] = None
        spelled = canonical_json(document)
        self.facts = replace(self.facts, fingerprint=fingerprint(spelled), fingerprint_json=spelled)
        self._news = spelled

    def take_news(self) -> str:
        """Return the JSON that workers have to adopt; empty: nothing new since the last call."""
        news, self._news = self._news, ""
        return news
