"""A stream of another dialect that another engine continues: the same events as without the break."""

from __future__ import annotations

import json
import re

import pytest

from contextcache.identity import Standby
from tests.kit.breaking_engine import BreakingEngine
from tests.kit.turn_bench import Pod

pytestmark = [
    pytest.mark.looptime,
    pytest.mark.parametrize("how", ["raise", "return", "error", "abort"]),
]
MESSAGES = {
    "path": "/v1/messages", "max_tokens": 30, "messages": [{"role": "user", "content": "tell"}],
    "context_create": "if_missing",
}  # fmt: skip
RESPONSES = {"path": "/v1/responses", "max_output_tokens": 30, "input": "tell", "conversation": "mine"}


async def events_of(folder, said, *breaks):
    """Return the events of a turn's stream whose engine breaks, and the ids of the items that the context keeps."""
    folder.mkdir()
    pod = Pod(folder, BreakingEngine(), resume_timeout_s=60)
    standby = BreakingEngine("standby")
    pod.story.standbys = lambda said: standby
    pod.standby = Standby("pod-b", "http://10.0.0.8:8000", "10.0.0.8:9000", "10.0.0.7:9000")
    await pod.ask("mine", temperature=0, **said)
    pod.engine.breaks = list(breaks)
    said = {name: value for name, value in said.items() if name != "context_create"}
    answer = await pod.ask("mine", temperature=0, stream=True, **said)
    events = [json.loads(data) for data in re.findall(rb"^data: (.*)$", answer.body, re.MULTILINE)]
    stored = json.loads((await pod.transcript("mine"))[1][-1].messages_json)
    return events, stored[0].get("item_ids")


async def test_a_message_goes_on_in_the_same_block(tmp_path, how):
    (*whole, whole_delta, stop), _ = await events_of(tmp_path / "whole", MESSAGES)
    (*told, delta, told_stop), _ = await events_of(tmp_path / "broken", MESSAGES, (5, how))

    assert (told[1:], told_stop) == (whole[1:], stop)
    assert [event["type"] for event in told].count("message_start") == 1
    assert delta["delta"] == whole_delta["delta"]
    assert delta["usage"]["context"]["resumed"][0]["to"] == "pod-b"
    assert delta["usage"]["output_tokens"] == whole_delta["usage"]["output_tokens"]


async def test_a_response_goes_on_in_the_same_item(tmp_path, how):
    (*whole, whole_last), _ = await events_of(tmp_path / "whole", RESPONSES)
    (*events, last), item_ids = await events_of(tmp_path / "broken", RESPONSES, (5, how))

    kinds = [event["type"] for event in whole]
    assert [event["type"] for event in events] == kinds
    assert [event.get("delta") for event in events] == [event.get("delta") for event in whole]
    assert [event["sequence_number"] for event in (*events, last)] == [*range(len(events) + 1)]
    assert [item["id"] for item in last["response"]["output"]] == item_ids
    assert (last["type"], last["response"]["id"]) == (whole_last["type"], whole_last["response"]["id"])
    assert last["response"]["usage"]["context"]["resumed"][0]["to"] == "pod-b"
    assert last["response"]["usage"]["output_tokens"] == whole_last["response"]["usage"]["output_tokens"]
