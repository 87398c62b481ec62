"""Plain English to fill a prompt with: pure, the same text for the same seed."""

from __future__ import annotations

import random

TOKENS_A_SENTENCE = 22.5
"""Measured with SmolLM2's tokenizer over 400 sentences."""

_WHO = (
    "The night watch", "A botanist", "The station cook", "Our second engineer", "The old ferry captain",
    "A visiting teacher", "The radio operator", "One of the carpenters", "The youngest sailor", "A tired courier",
)  # fmt: skip
_DID = (
    "wrote down", "measured twice", "could not explain", "photographed", "carried home", "repaired by lamplight",
    "counted again", "described to the others", "found in the cellar", "sold at the market",
)  # fmt: skip
_WHAT = (
    "a crate of green apples", "the height of the morning tide", "an unusual pattern of snow on the roof",
    "the broken clock from the library", "seven letters without an address", "a map of the northern valley",
    "the temperature of the spring", "a small brass telescope", "the names of all passengers", "a basket of blue yarn",
)  # fmt: skip
_WHEN = (
    "shortly before the storm", "on the last day of the harvest", "while the bridge was closed",
    "after the lights went out", "during the long winter", "as the train was leaving", "when nobody was looking",
    "in the hour before sunrise", "between two heavy showers", "at the end of a quiet week",
)  # fmt: skip


def plain_text(num_tokens: int, *, seed: int) -> str:
    """Return a log book of about `num_tokens` tokens that differs from its first words on for each seed."""
    choice = random.Random(seed).choice
    numbers = range(1, max(2, round(num_tokens / TOKENS_A_SENTENCE)))
    entries = (f"{number}. {choice(_WHO)} {choice(_DID)} {choice(_WHAT)} {choice(_WHEN)}." for number in numbers)
    return " ".join([f"Log book number {seed:09d}.", *entries])
