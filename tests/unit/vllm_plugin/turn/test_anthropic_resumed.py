"""A message's stream that another engine continues: the same events as without the break."""

from __future__ import annotations

import json

import pytest

from contextcache.identity import Standby
from tests.kit.breaking_engine import BreakingEngine
from tests.kit.turn_bench import Pod

pytestmark = pytest.mark.looptime


async def events_of(tmp_path, *breaks):
    """Return the events of a turn's stream whose engine breaks."""
    pod = Pod(tmp_path, BreakingEngine(), resume_timeout_s=60)
    standby = BreakingEngine("standby")
    pod.story.standbys = lambda said: standby
    pod.standby = Standby("pod-b", "http://10.0.0.8:8000", "10.0.0.8:9000", "10.0.0.7:9000")
    said = {"max_tokens": 30, "temperature": 0, "messages": [{"role": "user", "content": "tell"}]}
    await pod.ask("mine", path="/v1/messages", context_create="if_missing", **said)
    pod.engine.breaks = list(breaks)
    answer = await pod.ask("mine", path="/v1/messages", stream=True, **said)
    frames = [frame.split("\ndata: ") for frame in answer.body.decode().split("\n\n") if frame and frame[0] != ":"]
    return [json.loads(data) for _, data in frames]


@pytest.mark.parametrize("how", ["raise", "return", "error", "abort"])
async def test_a_message_goes_on_in_the_same_block(tmp_path, how):
    (tmp_path / "whole").mkdir()
    (tmp_path / "broken").mkdir()
    *whole, whole_delta, stop = await events_of(tmp_path / "whole")
    *told, delta, told_stop = await events_of(tmp_path / "broken", (5, how))

    assert (told[1:], told_stop) == (whole[1:], stop)
    assert [event["type"] for event in told].count("message_start") == 1
    assert delta["delta"] == whole_delta["delta"]
    assert delta["usage"]["context"]["resumed"][0]["to"] == "pod-b"
    assert delta["usage"]["output_tokens"] == whole_delta["usage"]["output_tokens"]
