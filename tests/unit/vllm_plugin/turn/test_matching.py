"""EXACT, EXTEND, DIVERGE or APPEND: what a prompt is to its transcript."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contextcache.items import messages_json
from contextcache.model import ContextMode, Segment, SegmentKind
from vllm_plugin.turn.prompt.matching import Divergence, Outcome, Why, begins_with_end_of, match
from vllm_plugin.turn.prompt.request import ClientPrompt
from vllm_plugin.turn.prompt.transcript import Transcript, common_prefix


def text_transcript(*texts: str) -> Transcript:
    kinds = (SegmentKind.PROMPT, SegmentKind.ANSWER)
    return Transcript(
        tuple(
            Segment(kinds[index % 2], tuple(ord(character) for character in text), text=text)
            for index, text in enumerate(texts)
        )
    )


def chat_transcript(*messages: dict) -> Transcript:
    return Transcript(
        tuple(
            Segment(
                SegmentKind.ANSWER if message["role"] == "assistant" else SegmentKind.PROMPT,
                (index,),
                messages_json=messages_json((message,)),
            )
            for index, message in enumerate(messages)
        )
    )


def auto(transcript, **prompt):
    return match(transcript, ClientPrompt(**prompt), mode=ContextMode.AUTO)


SYSTEM = {"role": "system", "content": "You know geography."}
YES = {"role": "user", "content": "Yes."}
USER = {"role": "user", "content": "What is the capital of France?"}
ASSISTANT = {"role": "assistant", "content": "Paris."}
NEXT = {"role": "user", "content": "And of Spain?"}


def test_the_first_prompt_again_is_a_replay_that_keeps_the_prompt_and_drops_the_answer():
    found = auto(text_transcript("Say this is a test", ", said the test"), text="Say this is a test")

    assert (found.outcome, found.keep_segments) == (Outcome.DIVERGE, 1)
    assert found.diverged == Divergence(None, Why.REGENERATED)


def test_the_whole_transcript_again_is_exact():
    found = auto(text_transcript("question", " answer"), text="question answer")

    assert (found.outcome, found.keep_segments) == (Outcome.EXACT, 2)


def test_the_whole_transcript_and_more_extends_it_by_the_new_text_only():
    found = auto(text_transcript("question", " answer"), text="question answer next")

    assert (found.outcome, found.keep_segments) == (Outcome.EXTEND, 2)


def test_other_text_is_appended_after_everything():
    found = auto(text_transcript("question", " answer"), text="And now?")

    assert (found.outcome, found.keep_segments) == (Outcome.APPEND, 2)


def test_an_edited_end_of_a_long_history_is_a_replay_that_keeps_the_turns_before_the_edit():
    transcript = text_transcript("a" * 50, "b" * 40, "c" * 10)

    found = auto(transcript, text="a" * 50 + "b" * 40 + "x")

    assert (found.outcome, found.keep_segments) == (Outcome.DIVERGE, 2)


def test_a_prompt_that_shares_less_than_the_threshold_is_appended():
    found = auto(text_transcript("a" * 50, "b" * 50), text="a" * 49)

    assert found.outcome is Outcome.APPEND


@pytest.mark.parametrize("given", [{"text": "a" * 80}, {"token_ids": (ord("a"),) * 80}], ids=["text", "ids"])
def test_a_prompt_that_shares_exactly_the_threshold_is_a_replay(given):
    found = auto(text_transcript("a" * 81, "b" * 19), **given)

    assert found.outcome is Outcome.DIVERGE
    assert found.keep_segments == 0


def test_context_mode_append_overrides_a_prompt_that_repeats_the_context():
    found = match(text_transcript("echo", "echo"), ClientPrompt(text="echo"), mode=ContextMode.APPEND)

    assert (found.outcome, found.keep_segments) == (Outcome.APPEND, 2)


def test_context_mode_replay_overrides_a_prompt_that_shares_nothing():
    found = match(text_transcript("one", "two"), ClientPrompt(text="three"), mode=ContextMode.REPLAY)

    assert (found.outcome, found.keep_segments) == (Outcome.DIVERGE, 0)


def test_token_ids_are_compared_as_ids_and_cut_at_whole_segments():
    transcript = text_transcript("abc", "def")

    found = auto(transcript, token_ids=tuple(map(ord, "abcdxyz")))

    assert (found.outcome, found.keep_segments) == (Outcome.DIVERGE, 1)


def test_messages_that_repeat_the_history_extend_it_by_the_new_ones():
    found = auto(chat_transcript(USER, ASSISTANT), messages=(USER, ASSISTANT, NEXT))

    assert (found.outcome, found.keep_segments) == (Outcome.EXTEND, 2)


def test_a_context_of_a_system_prompt_alone_is_extended_by_whoever_sends_it_again():
    found = auto(chat_transcript(SYSTEM), messages=(SYSTEM, USER))

    assert (found.outcome, found.keep_segments) == (Outcome.EXTEND, 1)


def test_one_message_that_was_said_before_is_new_words():
    found = auto(chat_transcript(USER, ASSISTANT, YES, ASSISTANT), messages=(YES,))

    assert (found.outcome, found.keep_segments) == (Outcome.APPEND, 4)


def test_new_messages_alone_are_appended():
    found = auto(chat_transcript(USER, ASSISTANT), messages=(NEXT,))

    assert (found.outcome, found.keep_segments) == (Outcome.APPEND, 2)


def test_an_edited_answer_in_the_history_keeps_what_came_before_it():
    edited = {"role": "assistant", "content": "London."}

    found = auto(chat_transcript(USER, ASSISTANT), messages=(USER, edited, NEXT))

    assert (found.outcome, found.keep_segments) == (Outcome.DIVERGE, 1)


def test_a_null_field_in_a_message_means_the_same_as_its_absence():
    client_form = {**ASSISTANT, "tool_calls": None, "refusal": None}

    found = auto(chat_transcript(USER, ASSISTANT), messages=(USER, client_form, NEXT))

    assert found.outcome is Outcome.EXTEND


def test_text_on_a_chat_context_is_appended():
    found = auto(chat_transcript(USER, ASSISTANT), text="What is the capital of France?")

    assert found.outcome is Outcome.APPEND


@given(st.lists(st.text(alphabet="ab", max_size=6), min_size=1, max_size=6), st.text("ab", max_size=30))
def test_what_stays_of_the_context_is_what_a_replay_begins_with(texts, prompt):
    transcript = text_transcript(*texts)

    found = match(transcript, ClientPrompt(text=prompt), mode=ContextMode.REPLAY)

    assert prompt.startswith(transcript.head(found.keep_segments).text)
    assert (found.outcome is Outcome.DIVERGE) == (found.diverged is not None)


@given(st.text("ab", max_size=16), st.text("ab", max_size=16), st.integers(1, 8))
def test_a_window_is_found_wherever_the_end_of_the_context_begins_a_prompt(stored, given_text, at_least):
    counted = any(
        given_text.startswith(stored[-length:])
        for length in range(at_least, len(stored) + 1)
        if length <= len(given_text)
    )

    assert begins_with_end_of(stored, given_text, at_least) == counted


@pytest.mark.parametrize(
    ("stored", "given_text"),
    [
        ("a" * 500_000, "a" * 250_000 + "b" + "a" * 250_000),
        ("b" + "a" * 500_000, "a" * 400_000 + "b" + "a" * 400_000),
        ("ab" * 250_000, "ba" * 250_000),
        ("a" * 250_000 + "b" + "a" * 250_000, "a" * 500_000 + "c"),
    ],
    ids=["one letter", "one letter and more", "two letters", "a bait in the middle"],
)
@pytest.mark.parametrize("at_least", [64, 200_000])
def test_texts_made_to_be_searched_for_long_are_not(stored, given_text, at_least):
    """Where the work is not bounded, minutes: the test's own time-out ends it."""
    begins_with_end_of(stored, given_text, at_least)


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_the_common_prefix_is_what_a_loop_counts(left, right):
    counted = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        counted += 1

    assert common_prefix(left, right) == counted
