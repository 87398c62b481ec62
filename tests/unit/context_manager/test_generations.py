"""Where generations ended (transcript.lua), held against a list that remembers all of them."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from context_manager.layout import RUNS_MAX, script_arguments, script_rules
from tests.kit.session_store import BlockingConnection

COMMITS = st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0, 1, 2, 2, 2, 2, 3])), min_size=1, max_size=60)
_SCRIPT = """
local row = {generation = a.generation, num_segments = a.num_segments, generations = a.field}
if a.keep then
  row.generations = generations_after(row, a.generation + 1, a.keep, a.num_segments)
  row.generation = a.generation + 1
end
row.generation = integer(row.generation)
local ends = {}
for generation = 0, row.generation + 1 do
  ends[#ends + 1] = segments_at(row, generation) or -1
end
return {row.generations, cjson.encode(ends), #read_runs(row)}
"""


class Runs:
    """The field of a row that tells where its generations ended, kept by the script's own functions."""

    def __init__(self, field: str = "0", generation: int = 0) -> None:
        self.field, self.generation, self.num_segments, self.num_runs = field, generation, 0, 0
        self.ends: dict[int, int] = {}
        self._redis = BlockingConnection().client

    def commit(self, keep: int, num_segments: int) -> None:
        self._run(keep=keep, num_segments=num_segments)
        self.generation, self.num_segments = self.generation + 1, num_segments

    def look(self) -> None:
        self._run(num_segments=self.num_segments)

    def _run(self, **more: int) -> None:
        # The row's own generation is a string, as in Redis.
        given = {"generation": self.generation, "field": self.field, "tombstone_ms": 0, **more}
        script = (
            script_rules()
            + "a.generation = tonumber(a.generation)\n"
            + _SCRIPT.replace("generation = a.generation,", "generation = integer(a.generation),")
        )
        field, ends, self.num_runs = self._redis.eval(script, 0, script_arguments(given))
        self.field = field.decode()
        self.ends = {generation: end for generation, end in enumerate(json.loads(ends)) if end >= 0}


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
    known, runs = Remembered(), Runs()
    for share, added in commits:
        keep = known.num_segments if share > 0.3 else int(share * known.num_segments)
        known.commit(keep, added)
        runs.commit(keep, known.num_segments)

        assert runs.ends.items() <= known.ends.items()
        assert runs.ends == known.ends or runs.num_runs == RUNS_MAX
        assert runs.ends[known.generation] == known.num_segments


def test_a_usual_conversation_is_one_run_however_long_it_is():
    runs = Runs()
    for generation in range(1, 201):
        runs.commit(2 * generation - 2, 2 * generation)

    assert runs.field == "200 1-200:2+2"
    assert runs.ends[100] == 200


def test_of_too_many_runs_the_oldest_go():
    runs = Runs()
    ends = [0]
    for generation in range(1, 200):
        ends.append(ends[-1] + generation % 3 * generation)
        runs.commit(ends[-2], ends[-1])

    assert runs.num_runs == RUNS_MAX
    assert 1 not in runs.ends
    assert [runs.ends[generation] for generation in range(190, 200)] == ends[190:]


def test_what_was_written_at_another_generation_or_is_damaged_says_nothing():
    for field, generation in (("4 1-4:2+2", 5), ("", 0), ("4 1-4:2 x-y:1+1", 4)):
        runs = Runs(field, generation)
        runs.look()

        assert runs.ends == {generation: 0}
