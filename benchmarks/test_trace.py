"""Recorded sessions and the schedule of bench_trace."""

from __future__ import annotations

from benchmarks.bench_trace import KILLED_TOKENS, Sample, rows_of, scheduled
from benchmarks.traces import BLOCK_TOKENS, sessions


def test_prompts_share_the_blocks_that_the_recording_shares():
    first, second = sessions(2)
    begun, continued = first.prompt(0), first.prompt(1)

    assert len(begun) == BLOCK_TOKENS * len(first.requests[0].blocks)
    assert continued[: len(begun)] == begun
    assert second.prompt(0)[:BLOCK_TOKENS] != begun[:BLOCK_TOKENS]


def test_sessions_take_turns_and_one_request_kills():
    order = scheduled(sessions(3))
    kills = [at for at, asked in enumerate(order) if asked.kills]

    assert [asked.session.name for asked in order[:3]] == [session.name for session in sessions(3)]
    assert kills == [len(order) // 3]
    assert order[kills[0]].body["max_tokens"] == KILLED_TOKENS
    assert [asked.phase for asked in order] == sorted(
        (asked.phase for asked in order), key=("calm", "killed", "lost").index
    )


def test_a_calm_schedule_has_the_same_requests_and_no_failure():
    calm, failing = scheduled(sessions(3), calm=True), scheduled(sessions(3))

    assert [(one.session.name, one.number) for one in calm] == [(one.session.name, one.number) for one in failing]
    assert {(one.phase, one.kills) for one in calm} == {("calm", False)}


def test_an_answer_that_differs_from_the_cold_one_is_wrong():
    order = scheduled(sessions(1))[:4]
    samples = [Sample(asked, "same", 10.0, 5, failures=at, took_ms=20.0) for at, asked in enumerate(order)]

    *_, whole = rows_of("ours", samples, {0: "same", 2: "other"})

    assert (whole["wrong"], whole["failures"], whole["computed_tokens"]) == (1, 6, 20)


def test_tokens_that_an_earlier_prompt_of_the_session_begins_with_are_recomputed_and_others_new():
    order = scheduled(sessions(1))[:2]
    begun, continued = (len(asked.body["prompt"]) for asked in order)
    samples = [Sample(asked, "", 10.0, len(asked.body["prompt"]), failures=0, took_ms=20.0) for asked in order]

    *_, whole = rows_of("plain", samples, {})

    assert [asked.new_tokens for asked in order] == [begun, continued - begun]
    assert whole["recomputed_tokens"] == begun
