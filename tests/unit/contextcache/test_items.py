"""Messages of a transcript as OpenAI's items, and back."""

from __future__ import annotations

import json

import pytest
from openai.types.conversations import ConversationItem
from pydantic import TypeAdapter

from contextcache.errors import InvalidRequest
from contextcache.items import (
    INSTRUCTIONS,
    ITEM_IDS,
    RESPONSE,
    items_of,
    messages_json,
    messages_of,
    pending_segment,
    stored_messages,
    untokenised,
    with_new_ids,
)
from contextcache.model import Segment, SegmentKind

ITEM = TypeAdapter(ConversationItem)
GIVEN = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_text", "text": "you"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Well"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Yes"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
    {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "x"},
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
]


def prompt(*messages, ids=(1,)):
    return Segment(SegmentKind.PROMPT, ids, messages_json=messages_json(messages))


def answer(text, *, item_id=None, **record):
    kept = {ITEM_IDS: [item_id], RESPONSE: record} if item_id else {}
    said = {"role": "assistant", "content": text, **kept}
    return Segment(SegmentKind.ANSWER, (2,), messages_json=messages_json((said,)))


def user(text):
    return {"role": "user", "content": text}


def shown(segments, name="conv_1"):
    return [one.item for one in items_of(segments, name=name)]


def added(items=GIVEN):
    return pending_segment(with_new_ids(messages_of(items), items))


def test_items_keep_type_and_text_and_are_valid_to_openais_types():
    """Seen failing: the calls of one message were all functions, or all custom, by the type of the first."""
    found = shown(added())
    for item in found:
        ITEM.validate_python(item, strict=True)

    assert [item["type"] for item in found] == [item.get("type", "message") for item in GIVEN]
    assert [part["text"] for part in found[1]["content"]] == ["Hi", "you"]
    assert found[2]["content"] == [{"type": "reasoning_text", "text": "Well"}]
    assert [found[at][key] for at, key in ((4, "arguments"), (5, "input"), (6, "output"))] == ["{}", "x", "1"]
    assert len({item["id"] for item in found}) == len(GIVEN)
    again = shown(added(found))
    assert [{**item, "id": ""} for item in again] == [{**item, "id": ""} for item in found]


def test_the_id_of_an_item_without_a_stored_one_stays_when_others_follow():
    """Seen failing: with the number of all segments in the digest, each turn gave other ids."""
    before = (prompt(user("Hi"), user("Hi")), answer("Yes"))
    ids = [item["id"] for item in shown(before)]

    assert len(set(ids)) == 3
    assert [item["id"] for item in shown((*before, prompt(user("Hi")), answer("Yes")))][:3] == ids
    assert not set(ids) & {item["id"] for item in shown(before, name="conv_2")}


def test_items_that_are_equal_and_come_to_one_place_have_two_ids():
    """Seen failing: behind a deleted item, an item had the id of an equal one that had moved."""
    segments = (prompt(user("Hi"), user("Yes")),)
    placed = items_of(segments, name="conv_1")
    left = untokenised(segments, placed, 0, gone=placed[0])
    ids = [item["id"] for item in shown((*left, prompt(user("Yes")), prompt({**user("Yes"), ITEM_IDS: ["msg_1"]})))]
    forged = shown((prompt(*[{**user("Hi"), ITEM_IDS: ["msg_1"]}] * 2),))

    assert ids[0] == placed[1].item["id"]
    assert len(set(ids)) == 3
    assert forged[0]["id"] != forged[1]["id"]


def test_what_a_client_writes_as_ids_is_no_id_of_its_items():
    """Seen failing: a number in the place of the list raised TypeError."""
    for forged in (7, [7], "msg_1", None, {"a": 1}):
        (item,) = shown((prompt({**user("Hi"), ITEM_IDS: forged}),))

        assert item["id"] == shown((prompt(user("Hi")),))[0]["id"]


@pytest.mark.parametrize(
    "odd",
    [
        *({"tool_calls": {"a": 1}}, {"tool_calls": [{}]}, {"tool_calls": None}, {"content": None}, {"content": []}),
        *({"tool_calls": ["x"]}, {"tool_calls": [{"function": "x"}]}, {"tool_calls": [{"id": [1], "function": {}}]}),
        *({"tool_calls": [{"function": {"name": 1, "arguments": {}}}]}, {"tool_call_id": [1], "content": "x"}),
        *({"reasoning": [1]}, {"reasoning": {"a": 1}}),
    ],
)
def test_odd_messages_of_a_client_make_no_list_fail(odd):
    """Seen failing: a tool call without a function, reasoning that is a list, and an id that is one raised."""
    for role in ("assistant", "user", "tool"):
        items = shown((prompt({"role": role, **odd}, user("Hi")),))
        for item in items:
            ITEM.validate_python(item)

        assert items[-1]["content"][0]["text"] == "Hi"


def test_text_of_completions_is_a_message_that_cannot_be_deleted():
    segments = (Segment(SegmentKind.PROMPT, (1,), text="Once"), Segment(SegmentKind.ANSWER, (2,), text="upon"))
    placed = items_of(segments, name="conv_1")

    assert [(one.item["role"], one.item["content"][0]["text"]) for one in placed] == [
        *(("user", "Once"), ("assistant", "upon"))
    ]
    with pytest.raises(InvalidRequest):
        untokenised(segments, placed, 1, gone=placed[1])


@pytest.mark.parametrize("gone", range(len(GIVEN)))
def test_the_other_items_stay_as_they_are_when_one_is_deleted(gone):
    """Seen failing: with a call of two, both went."""
    segments = (*added(), answer("Bye", item_id="msg_1"))
    placed = items_of(segments, name="conv_1")
    left = untokenised(segments, placed, 0, gone=placed[gone])

    assert shown(left) == [one.item for one in placed if one is not placed[gone]]
    assert [segment.num_tokens for segment in left] == [0]


def test_instructions_of_a_response_are_no_item_and_those_of_a_client_are():
    """Seen failing: the instructions of a response were the first item of its conversation."""
    system = {"role": "system", "content": "Be brief."}
    for mark, texts in (({RESPONSE: INSTRUCTIONS}, ["Hi", "Yes"]), ({}, ["Be brief.", "Hi", "Yes"])):
        segments = (prompt({**system, **mark}, user("Hi")), answer("Yes", item_id="msg_1"))
        placed = items_of(segments, name="conv_1")
        (left,) = untokenised(segments, placed, 0, gone=placed[-1])

        assert [one.item["content"][0]["text"] for one in placed] == texts
        assert [message["content"] for message in stored_messages(left)] == ["Be brief.", "Hi"]


def test_an_answer_has_no_item_for_reasoning_that_is_not_stored():
    segment = answer("Yes", item_id="rs_1")
    said = {**stored_messages(segment)[0], ITEM_IDS: ["rs_1", "msg_2"]}
    (item,) = shown((Segment(SegmentKind.ANSWER, (2,), messages_json=json.dumps([said])),))

    assert (item["id"], item["type"]) == ("msg_2", "message")
