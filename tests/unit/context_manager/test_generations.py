"""Where generations ended, held against a list that remembers all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from context_manager.generations import RUNS_MAX, Runs, runs_after, runs_field, runs_of, segments_at

COMMITS = st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0, 1, 2, 2, 2, 2, 3])), min_size=1, max_size=60)


class Remembered:
    """Every generation that is still a leading part of the transcript, one by one."""

    def __init__(self) -> None:
        self.ends: dict[int, int] = {}
        self.generation = 0
        self.num_segments = 0

    def commit(self, keep: int, added: int) -> None:
        self.ends = {generation: end for generation, end in self.ends.items() if end <= keep}
        self.generation, self.num_segments = self.generation + 1, keep + added
        self.ends[self.generation] = self.num_segments


@given(COMMITS)
def test_runs_tell_of_every_generation_what_a_list_of_all_tells(commits):
    """Seen to fail with runs that were not cut, and with a run gone on with after a gap."""
    known = Remembered()
    runs: Runs = ()
    for share, added in commits:
        keep = known.num_segments if share > 0.3 else int(share * known.num_segments)
        known.commit(keep, added)
        runs = runs_after(runs, known.generation, keep_segments=keep, num_segments=known.num_segments)
        told = {generation: segments_at(runs, generation) for generation in range(known.generation + 2)}

        found = {generation: end for generation, end in told.items() if end is not None}
        assert found.items() <= known.ends.items()
        assert found == known.ends or len(runs) == RUNS_MAX
        assert told[known.generation] == known.num_segments
        assert runs_of(runs_field(runs, known.generation), known.generation) == runs


def test_a_usual_conversation_is_one_run_however_long_it_is():
    runs: Runs = ()
    for generation in range(1, 1001):
        runs = runs_after(runs, generation, keep_segments=2 * generation - 2, num_segments=2 * generation)

    assert runs_field(runs, 1000) == "1000 1-1000:2+2"
    assert segments_at(runs, 500) == 1000


def test_of_too_many_runs_the_oldest_go():
    runs: Runs = ()
    ends = [0]
    for generation in range(1, 200):
        ends.append(ends[-1] + generation % 3 * generation)
        runs = runs_after(runs, generation, keep_segments=ends[-2], num_segments=ends[-1])

    assert len(runs) == RUNS_MAX
    assert segments_at(runs, 1) is None
    assert [segments_at(runs, generation) for generation in range(190, 200)] == ends[190:]


def test_what_was_written_at_another_generation_or_is_damaged_says_nothing():
    assert runs_of("4 1-4:2+2", 5) == ()
    assert runs_of("", 0) == ()
    assert runs_of("4 1-4:2 x-y:1+1", 4) == ()
