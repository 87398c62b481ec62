"""Cache hints and marks of a request: read, bounded and answered."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types import CacheControlEphemeralParam
from openai.types.responses.response_create_params import PromptCacheOptions

from contextcache.errors import InvalidRequest
from contextcache.hints import ACTIONS_MAX, Hint, Hints, marked_ms, read_hints
from contextcache.model import NO_PROMISE, Placement, Promise, SaveOutcome

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000
RETAIN = {"action_type": "retain", "payload": {"ttl": 600}}


def asked(*actions: dict[str, Any]) -> tuple[Hint, ...]:
    return read_hints({"protocol_version": "1", "message_id": "m", "actions": list(actions)})


def test_actions_are_read_from_vllms_envelope() -> None:
    found = asked(
        RETAIN,
        {"action_id": "a", "action_type": "Pin", "action_version": "1", "payload": {"ttl": 60.0}},
        {"action_type": "pin", "payload": {"ttl": 60, "tier": "disk", "priority": 3}},
        {"action_type": "Demote"},
    )

    assert found == (
        Hint("0", "retain", 600),
        Hint("a", "Pin", 60, pinned=True),
        Hint("2", "pin", 60),
        Hint("3", "Demote"),
    )
    assert read_hints(None) == ()


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        {"actions": {}},
        {"actions": [7]},
        {"actions": [{}]},
        {"actions": [{"action_type": "retain"}]},
        {"actions": [{"action_type": "retain", "payload": {"ttl": 0}}]},
        {"actions": [{"action_type": "retain", "payload": {"ttl": 1.5}}]},
        {"actions": [{"action_type": "retain", "payload": {"ttl": "1h"}}]},
        {"actions": [{"action_type": "retain", "payload": {"ttl": 1e300}}]},
        {"actions": [{"action_type": "pin", "payload": {"ttl": 1, "tier": "device"}}]},
        {"actions": [{"action_type": "x" * 65}]},
        {"actions": [{"action_type": "demote", "action_id": "x" * 65}]},
        {"actions": [RETAIN] * (ACTIONS_MAX + 1)},
    ],
    ids=str,
)
def test_a_malformed_hint_is_refused_by_its_field(value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_hints(value)

    assert refused.value.param == "kv_hints"
    assert len(refused.value.message) < 300


def test_each_hint_has_one_answer() -> None:
    hints = Hints(asked(RETAIN, {"action_type": "pin", "payload": {"ttl": 900}}, {"action_type": "compress"}))

    def outcomes(promise: Promise, *, retain_ms: int = 900_000) -> list[tuple[str, Any]]:
        saved = SaveOutcome(is_sealed=True, promise=promise)
        answers = hints.answers(saved, retain_ms=retain_ms, expires_at_ms=10**15)
        return [(answer["outcome"], answer.get("tier") or answer["reason"]) for answer in answers]

    unsupported = ("denied", "unsupported")
    assert outcomes(Promise(5_000_000, pinned=True)) == [("accepted", "host"), ("accepted", "host"), unsupported]
    assert outcomes(Promise(5_000_000)) == [("accepted", "disk"), ("clipped", "disk"), unsupported]
    assert outcomes(Promise(5_000_000, pinned=True), retain_ms=700_000)[1] == ("clipped", "host")
    assert outcomes(Promise(5_000_000, reason="no_room"))[0] == ("clipped", "disk")
    assert outcomes(Promise(reason="no_room"))[:2] == [("denied", "no_room")] * 2
    assert outcomes(NO_PROMISE)[0] == ("denied", "not_saved")


def test_placements_are_answered_in_their_places_and_without_an_answer_denied() -> None:
    """Seen failing: answers were given to the first hints, whatever these asked for."""
    hints = Hints(asked({"action_type": "Prefetch"}, RETAIN, {"action_type": "demote"}, {"action_type": "share"}))
    placed = (Placement("accepted", "", 7, "host"), Placement("clipped", "in_use", 3, "disk"))
    saved = SaveOutcome(is_sealed=True, promise=Promise(5_000), placements=placed)
    answers = hints.answers(saved, retain_ms=600_000, expires_at_ms=10**15)

    assert hints.placements == ("prefetch", "demote", "share")
    assert answers == [
        {"action_id": "0", "action_type": "Prefetch", "outcome": "accepted", "bytes": 7, "tier": "host"},
        {"action_id": "1", "action_type": "retain", "outcome": "accepted", "until": 5, "tier": "disk"},
        {
            "action_id": "2",
            "action_type": "demote",
            "outcome": "clipped",
            "bytes": 3,
            "tier": "disk",
            "reason": "in_use",
        },
        {"action_id": "3", "action_type": "share", "outcome": "denied", "reason": "not_saved"},
    ]
    assert Hints(asked({"action_type": "demote"})).retain_ms() == 0


def test_a_promise_is_told_to_end_with_its_context() -> None:
    saved = SaveOutcome(is_sealed=True, promise=Promise(9_000))
    [answer] = Hints(asked(RETAIN)).answers(saved, retain_ms=600_000, expires_at_ms=7_000)

    assert answer == {"action_id": "0", "action_type": "retain", "outcome": "accepted", "until": 7, "tier": "disk"}


def test_the_longest_wish_is_asked_for_and_no_more_than_a_day_or_the_life_of_the_kv() -> None:
    hints = Hints(asked(RETAIN, {"action_type": "retain", "payload": {"ttl": 1200}}), marked_ms=300_000)

    assert hints.retain_ms() == 1_200_000
    assert hints.retain_ms(900_000) == 900_000
    assert hints.retain_ms(-5) == 0
    assert Hints(asked({"action_type": "retain", "payload": {"ttl": 10**9}})).retain_ms() == DAY_MS
    assert Hints().retain_ms() == 0


def marked(body: Any) -> int:
    return marked_ms(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("body", "ms"),
    [
        ({"cache_control": {"type": "ephemeral"}}, 5 * MINUTE_MS),
        ({"system": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}, HOUR_MS),
        (
            {"messages": [{"cache_control": {"ttl": "5m", "type": "ephemeral"}}], "cache_control": {"ttl": "1h"}},
            HOUR_MS,
        ),
        ({"prompt_cache_options": {}}, 30 * MINUTE_MS),
        ({"prompt_cache_options": {"mode": "implicit", "ttl": "12h"}}, 12 * HOUR_MS),
        ({"prompt_cache_options": {"mode": "explicit", "ttl": "12h"}}, 0),
        (
            {
                "prompt_cache_options": {"mode": "explicit", "ttl": "12h"},
                "input": [{"content": [{"prompt_cache_breakpoint": {"mode": "explicit"}}]}],
            },
            12 * HOUR_MS,
        ),
        ({"prompt_cache_retention": "24h"}, DAY_MS),
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"cache_control": None}, 0),
        ({"cache_control": {"ttl": "99h"}}, DAY_MS),
        ({"prompt": 'say "cache_control": {"ttl": "1h"} and "prompt_cache_retention": "24h"'}, 0),
        ({"prompt": "plain"}, 0),
    ],
    ids=str,
)
def test_marks_of_other_apis_ask_for_their_lifetimes(body: Any, ms: int) -> None:
    """Seen failing: text that quotes a mark is no mark; without the quote in the pattern it was one."""
    assert marked(body) == ms


def test_lifetimes_of_the_packages_are_known() -> None:
    """The packages' own types name every lifetime that a client can send."""
    for kind, field in ((CacheControlEphemeralParam, "cache_control"), (PromptCacheOptions, "prompt_cache_options")):
        ttls = get_args(get_type_hints(kind)["ttl"])

        assert ttls
        assert all(marked({field: {"ttl": ttl}}) >= 5 * MINUTE_MS for ttl in ttls)
        assert len({marked({field: {"ttl": ttl}}) for ttl in ttls}) == len(ttls)


def test_many_explicit_options_search_the_body_for_a_breakpoint_once() -> None:
    """Seen failing: 64 options in a body of 32 MB took 1.5 seconds, because each searched all of it."""

    class Counting(bytes):
        searched = 0

        def __contains__(self, part: Any) -> bool:
            Counting.searched += part == b'"prompt_cache_breakpoint"'
            return super().__contains__(part)

    options = b'{"prompt_cache_options":{"mode":"explicit"}},'

    assert marked_ms(Counting(b'{"a":[' + options * 64 + b"0]}")) == 0
    assert marked_ms(Counting(b'{"a":[' + options * 63 + b'{"cache_control":{}}]}')) == 5 * MINUTE_MS
    assert Counting.searched == 2


def test_a_million_marks_cost_as_much_as_a_few() -> None:
    """The first 64 count: a later, longer one is not looked at."""
    few = b'{"a":[' + b'{"cache_control":{}},' * 64 + b'{"cache_control":{"ttl":"1h"}}]}'

    assert marked_ms(few) == 5 * MINUTE_MS


def test_names_that_begin_no_mark_are_bounded_too() -> None:
    """Seen failing: 32 MiB of quotes or of open braces held up the event loop for half a second."""
    assert marked_ms(b'{"a":[' + b'{"cache_control":0},' * 64 + b'{"cache_control":{}}]}') == 0
    assert marked_ms(b'{"a":[' + b'{"cache_control":0},' * 63 + b'{"cache_control":{}}]}') == 5 * MINUTE_MS
