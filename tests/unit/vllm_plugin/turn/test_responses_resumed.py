"""A response's stream that another engine continues: the same events as without the break."""

from __future__ import annotations

import json
import re

import pytest

from contextcache.identity import Standby
from tests.kit.breaking_engine import BreakingEngine
from tests.kit.turn_bench import Pod

pytestmark = pytest.mark.looptime


async def events_of(tmp_path, *breaks):
    """Return the events of a turn's stream whose engine breaks, and the ids of the items that the context keeps."""
    pod = Pod(tmp_path, BreakingEngine(), resume_timeout_s=60)
    standby = BreakingEngine("standby")
    pod.story.standbys = lambda said: standby
    pod.standby = Standby("pod-b", "http://10.0.0.8:8000", "10.0.0.8:9000", "10.0.0.7:9000")
    said = {"max_output_tokens": 30, "temperature": 0, "input": "tell", "conversation": "mine"}
    await pod.ask("mine", path="/v1/responses", **said)
    pod.engine.breaks = list(breaks)
    answer = await pod.ask("mine", path="/v1/responses", stream=True, **said)
    events = [json.loads(data) for data in re.findall(rb"^data: (.*)$", answer.body, re.MULTILINE)]
    stored = json.loads((await pod.transcript("mine"))[1][-1].messages_json)
    return events, stored[0]["item_ids"]


@pytest.mark.parametrize("how", ["raise", "return", "error", "abort"])
async def test_a_response_goes_on_in_the_same_item(tmp_path, how):
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    (*whole, whole_last), _ = await events_of(tmp_path / "whole")
    (*events, last), item_ids = await events_of(tmp_path / "broken", (5, how))

    kinds = [event["type"] for event in whole]
    assert [event["type"] for event in events] == kinds
    assert [event.get("delta") for event in events] == [event.get("delta") for event in whole]
    assert [event["sequence_number"] for event in (*events, last)] == [*range(len(events) + 1)]
    assert [item["id"] for item in last["response"]["output"]] == item_ids
    assert (last["type"], last["response"]["id"]) == (whole_last["type"], whole_last["response"]["id"])
    assert last["response"]["usage"]["context"]["resumed"][0]["to"] == "pod-b"
    assert last["response"]["usage"]["output_tokens"] == whole_last["response"]["usage"]["output_tokens"]
