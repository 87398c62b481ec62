"""The judge of the races: what it must refuse, and what it must let pass."""

import pytest

from tests.kit.faults.races_model import Attempt, Told, answer_to, explain


def told(attempt, told, *, generation=0, before=""):
    attempt.told, attempt.generation = told, generation
    attempt.answer = answer_to(before + attempt.prompt)
    return attempt


CREATE = told(Attempt("<c>", is_create=True), Told.COMMITTED, generation=1)
ONE = CREATE.applied("")
FIRST = told(Attempt("<1>"), Told.COMMITTED, generation=2, before=ONE)
TWO = FIRST.applied(ONE)
UNKNOWN = Attempt("<u>")
REPLAY = Attempt(ONE + "<r>", is_replay=True)
READER = told(Attempt("<q>"), Told.READ_ONLY, generation=2, before=TWO)


@pytest.mark.parametrize(
    ("attempts", "generation", "text"),
    [
        ([CREATE], 1, ONE),
        ([CREATE, FIRST], 2, TWO),
        ([CREATE, FIRST, UNKNOWN], 2, TWO),
        ([CREATE, FIRST, UNKNOWN], 3, UNKNOWN.applied(TWO)),
        ([CREATE, FIRST, REPLAY], 3, REPLAY.applied("")),
        ([CREATE, FIRST, UNKNOWN, REPLAY], 4, REPLAY.applied("")),
        ([CREATE, FIRST, UNKNOWN, READER], 3, UNKNOWN.applied(TWO)),
    ],
)
def test_a_serial_order_is_explained(attempts, generation, text):
    assert explain(attempts, life=0, generation=generation, text=text) == ""


@pytest.mark.parametrize(
    ("attempts", "generation", "text"),
    [
        pytest.param([CREATE, FIRST], 1, ONE, id="lost"),
        pytest.param([CREATE, FIRST], 2, UNKNOWN.applied(ONE), id="replaced"),
        pytest.param([CREATE, FIRST], 3, FIRST.applied(TWO), id="twice"),
        pytest.param([CREATE, UNKNOWN], 3, UNKNOWN.applied(UNKNOWN.applied(ONE)), id="unknown-twice"),
        pytest.param(
            [CREATE, told(Attempt("<a>"), Told.ABSENT)], 2, Attempt("<a>").applied(ONE), id="refused-yet-there"
        ),
        pytest.param([CREATE, FIRST, told(Attempt("<d>"), Told.COMMITTED, generation=2)], 2, TWO, id="same-generation"),
        pytest.param([CREATE, FIRST, READER], 2, UNKNOWN.applied(ONE), id="reader"),
        pytest.param([CREATE], 1, ONE[:-1], id="torn"),
    ],
)
def test_anything_else_is_not(attempts, generation, text):
    assert explain(attempts, life=0, generation=generation, text=text) != ""


def test_a_reader_of_another_transcript_is_told():
    wrong = told(Attempt("<q>"), Told.READ_ONLY, generation=2, before=ONE)

    assert explain([CREATE, FIRST, wrong], life=0, generation=2, text=TWO) != ""


def test_a_turn_of_an_earlier_life_of_the_name_is_not_asked_for():
    before = told(Attempt("<old>"), Told.COMMITTED, generation=7)
    create = told(Attempt("<c>", is_create=True), Told.COMMITTED, generation=1)
    create.lives = (1, 1)

    assert explain([before, create], life=1, generation=1, text=ONE) == ""
