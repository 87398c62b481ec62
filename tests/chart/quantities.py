"""Kubernetes quantities: how an API server spells them, and their value.

Rules: k8s.io/apimachinery pkg/api/resource, "canonical form": no precision is lost, no fractional digits are emitted,
and the suffix is as large as possible. A number keeps its notation: binary, decimal or with an exponent.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_QUANTITY = re.compile(r"([+-]?[0-9]+\.?[0-9]*|[+-]?\.[0-9]+)([eE][+-]?[0-9]+|[A-Za-z]*)")


def value(quantity: str | float) -> Fraction:
    """Return the exact number. Raises ValueError: not a quantity."""
    number, suffix = _split(quantity)
    if suffix in _BINARY:
        return number * 1024 ** _BINARY.index(suffix)
    return number * Fraction(10) ** (int(suffix[1:]) if _has_exponent(suffix) else _DECIMAL[suffix])


def canonical(quantity: str | float) -> str:
    """Return the spelling that an API server stores: `2048Mi` is `2Gi`, `0.5Ti` is `512Gi`, `1.5` is `1500m`."""
    _, suffix = _split(quantity)
    exact = value(quantity)
    if suffix in _BINARY[1:] and exact.denominator == 1 and abs(exact) >= 1024:
        power = max(power for power in range(len(_BINARY)) if exact % 1024**power == 0)
        return f"{exact // 1024**power}{_BINARY[power]}"
    # Nine digits behind the point are kept, the rest is rounded up.
    exact = Fraction(math.ceil(exact * 10**9), 10**9)
    powers = [power for power in _DECIMAL.values() if (exact / Fraction(10) ** power).denominator == 1]
    power = max(powers) if exact else 0
    number = exact / Fraction(10) ** power
    if _has_exponent(suffix):
        return f"{number}e{power}" if power else f"{number}"
    return f"{number}{next(name for name, of in _DECIMAL.items() if of == power)}"


def _has_exponent(suffix: str) -> bool:
    return suffix[:1] in {"e", "E"} and len(suffix) > 1


def _split(quantity: str | float) -> tuple[Fraction, str]:
    found = _QUANTITY.fullmatch(str(quantity))
    if found is None or not (found[2] in _BINARY or found[2] in _DECIMAL or _has_exponent(found[2])):
        raise ValueError(f"quantities must match the regular expression {_QUANTITY.pattern}; got {quantity!r}")
    return Fraction(found[1].rstrip(".") or "0"), found[2]
