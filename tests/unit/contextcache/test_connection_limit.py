"""Who holds a connection and says nothing makes room first; who has asked, only when nobody is silent."""

import pytest

from contextcache.wire.connections import ConnectionLimit


class Transport:
    def __init__(self):
        self.aborted = 0

    def abort(self):
        self.aborted += 1


@pytest.fixture
def three():
    return [Transport() for _ in range(3)]


@pytest.mark.parametrize(("asked", "goes"), [((), 0), ((0,), 1), ((0, 1, 2), 0), ((1, 2), 0)])
def test_one_too_many_takes_the_place_of_the_oldest_silent_one_or_of_the_oldest(three, asked, goes):
    limit = ConnectionLimit(3)
    for transport in three:
        limit.admit(transport)
    for number in asked:
        limit.note_asked(three[number])
    limit.admit(Transport())

    assert [transport.aborted for transport in three] == [int(number == goes) for number in range(3)]


def test_an_end_frees_a_place_and_may_be_told_twice(three):
    limit = ConnectionLimit(2)
    for transport in three[:2]:
        limit.admit(transport)
    limit.end(three[0])
    limit.end(three[0])
    limit.admit(three[2])

    assert (three[1].aborted, three[2].aborted) == (0, 0)


@pytest.mark.parametrize(("asked", "goes"), [((), 0), ((0,), 1), ((0, 1, 2), None)])
def test_a_server_of_streams_refuses_one_too_many_instead_of_the_oldest_stream(three, asked, goes):
    """Seen failing with the rule of the metrics port: the oldest stream was cut."""
    limit, newcomer = ConnectionLimit(3, replaces_asked=False), Transport()
    for transport in three:
        limit.admit(transport)
    for number in asked:
        limit.note_asked(three[number])
    limit.admit(newcomer)

    assert [transport.aborted for transport in three] == [int(number == goes) for number in range(3)]
    assert newcomer.aborted == int(goes is None)
