"""KV stored in fewer bits, with real sidecars and engines: restored nearly as it was, and by nobody else."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contextcache.names import new_cache_ref
from kv_sidecar.format.safetensors_header import decode_header
from tests.kit.connector_rank import BLOCK_TOKENS, ENGINE_BLOCK_TOKENS, Rank, door_of, load_plan, save_plan
from tests.kit.sidecar_process import SidecarProcess
from tests.kit.tiny_engine import SECRET, Start, TinyEngine
from tests.kit.tiny_model import make_tiny_model
from vllm_plugin.connector.metadata import refusal

pytestmark = pytest.mark.timeout(600)

CODECS = {"none": 0.0, "q8": 1 / 255, "q4": 1 / 15}
"""And how far a number between 0 and 1 may be off."""
NUM_TOKENS = 2 * BLOCK_TOKENS + ENGINE_BLOCK_TOKENS + 7
"""Two blocks, and a tail with a full page and another."""
NUM_PAGES = -(-NUM_TOKENS // ENGINE_BLOCK_TOKENS)
OLD, NEW = list(range(1, 1 + NUM_PAGES)), list(range(31, 31 + NUM_PAGES))
PROMPT = random.Random(4).choices(range(400), k=620)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[SidecarProcess]:
    process = SidecarProcess(tmp_path, block_tokens=BLOCK_TOKENS, memory_limit_bytes=16 << 20)
    process.start()
    yield process
    process.kill()


@contextmanager
def rank_of(process: SidecarProcess, codec: str) -> Iterator[Rank]:
    rank = Rank(door_of(process), codec=codec)
    try:
        yield rank
    finally:
        rank.side.shutdown()


def bytes_of(process: SidecarProcess, name: str) -> bytes:
    """Return the tensor of the only file on disk whose name begins like that."""
    (path,) = (path for path in process.block_files() if path.name.startswith(name))
    data = path.read_bytes()
    _, start = decode_header(memoryview(data))
    return data[start:]


@pytest.mark.parametrize("codec", CODECS)
def test_full_pages_come_back_within_half_a_step_and_the_last_one_exactly(sidecar: SidecarProcess, codec: str) -> None:
    with rank_of(sidecar, codec) as rank:
        plan = save_plan(rank, new_cache_ref(), NUM_TOKENS, OLD)
        rank.run(save=plan)
        manifest = rank.manifest(plan.cache_ref)
        results = rank.run(load=load_plan(rank, manifest, NEW))

        assert results.failed == set()
        for tensor in rank.kv.values():
            off = (tensor[NEW] - tensor[OLD]).abs().amax((1, 2, 3))
            assert off[-1] == 0
            assert (off[:-1] > 0).all() == (codec != "none")
            assert off.max() <= 0.51 * CODECS[codec]


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_what_was_restored_is_saved_again_by_the_same_bytes(sidecar: SidecarProcess, codec: str) -> None:
    """Blocks are not sent again, and the tail's full pages are what they were: nothing is coded a second time."""
    with rank_of(sidecar, codec) as rank:
        first = save_plan(rank, new_cache_ref(), NUM_TOKENS, OLD)
        rank.run(save=first)
        rank.run(load=load_plan(rank, rank.manifest(first.cache_ref), NEW))
        files = {path.name: path.stat().st_mtime_ns for path in sidecar.block_files()}
        again = save_plan(rank, new_cache_ref(), NUM_TOKENS, NEW)
        rank.run(save=again)
        rank.manifest(again.cache_ref)

        assert {path.name for path in sidecar.block_files()} - files.keys() == {f"{again.cache_ref}.r0.safetensors"}
        assert bytes_of(sidecar, again.cache_ref) == bytes_of(sidecar, first.cache_ref)
        assert all(path.stat().st_mtime_ns == files[path.name] for path in sidecar.block_files() if path.name in files)


def test_engines_of_other_codecs_are_given_nothing(sidecar: SidecarProcess) -> None:
    with rank_of(sidecar, "q8") as writer:
        plan = save_plan(writer, new_cache_ref(), NUM_TOKENS, OLD)
        writer.run(save=plan)
        manifest = writer.manifest(plan.cache_ref)
    for codec in ("none", "q4"):
        with rank_of(sidecar, codec) as rank:
            assert rank.side.facts is not None
            asked = load_plan(rank, manifest, NEW)
            insisted = replace(asked, fingerprint=rank.side.facts.fingerprint)

            assert refusal(manifest, rank.side.facts) == "fingerprint_mismatch"
            assert rank.run(load=insisted).failed == {"engine-load"}


@pytest.mark.parametrize("codec", ["none", "q4"])
def test_a_file_coded_in_another_way_is_not_misread(sidecar: SidecarProcess, codec: str) -> None:
    """Whatever its fingerprint says: what a file says of its codec has to be what the reader would write."""
    with rank_of(sidecar, "q8") as writer:
        plan = save_plan(writer, new_cache_ref(), NUM_TOKENS, OLD)
        writer.run(save=plan)
        manifest = writer.manifest(plan.cache_ref)
    with rank_of(sidecar, codec) as rank:
        before = {name: tensor.clone() for name, tensor in rank.kv.items()}
        results = rank.run(load=load_plan(rank, manifest, NEW))

        assert results.failed == {"engine-load"}
        assert rank.side.counters.get("failed_loads", "corrupt_block") == 1
        assert all(torch.equal(tensor, before[name]) for name, tensor in rank.kv.items())


@pytest.mark.parametrize("codec", ["q8", "q4"])
def test_a_context_with_a_number_that_has_no_code_is_not_saved(sidecar: SidecarProcess, codec: str) -> None:
    with rank_of(sidecar, codec) as rank:
        rank.kv["l1"][OLD[2], 1, 3, 5] = float("inf")
        plan = save_plan(rank, new_cache_ref(), NUM_TOKENS, OLD)
        results = rank.run(save=plan)

        assert results.sent == {plan.engine_request_id}
        assert rank.side.counters.get("skipped_saves", "not_finite") == 1
        assert rank.side._saver is not None


class Engines:
    """Engines on one tiny model and one store, one after the other."""

    def __init__(self, directory: Path) -> None:
        self._secret = directory / "secret"
        self._secret.write_bytes(SECRET)
        self._model = str(make_tiny_model(directory / "model"))
        self.sidecar = SidecarProcess(directory)
        self.sidecar.start()

    @contextmanager
    def start(self, codec: str) -> Iterator[TinyEngine]:
        connector = {"codec": codec}
        with TinyEngine(Start(self._model, self.sidecar.address, str(self._secret), connector=connector)) as engine:
            yield engine

    def saved(self, engine: TinyEngine) -> tuple[str, dict[str, Any]]:
        ref = new_cache_ref()
        engine.order("forget", connector=False)
        answer = engine.ask(PROMPT, save=ref)
        self.sidecar.wait_sealed(ref)
        return ref, answer


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    found = Engines(tmp_path)
    yield found
    found.sidecar.kill()


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return how far the log-probabilities of the first token are apart, which both made of the prompt alone."""
    return float(abs(one["logprobs"][0] - other["logprobs"][0]))


@pytest.mark.thorough
def test_an_answer_is_near_after_everything_was_killed_and_another_codec_computes_it(engines: Engines) -> None:
    """A store whose engines change their codec: a miss each time, never somebody else's bytes."""
    refs: dict[str, str] = {}
    cold: dict[str, dict[str, Any]] = {}
    for codec in ("q8", "none", "q4"):
        with engines.start(codec) as engine:
            missed = engine.ask(PROMPT, load=tuple(refs.values()))
            refused = engine.order("counts").get("refused_manifests fingerprint_mismatch", 0)
            refs[codec], cold[codec] = engines.saved(engine)

        assert (missed["cached_tokens"], refused) == (0, min(1, len(refs) - 1))
        assert (missed["token_ids"], missed["logprobs"]) == (cold[codec]["token_ids"], cold[codec]["logprobs"])
    engines.sidecar.kill()
    engines.sidecar.start()
    off = {}
    for codec in CODECS:
        with engines.start(codec) as engine:
            restored = engine.ask(PROMPT, load=(refs[codec],))

        assert restored["cached_tokens"] == len(PROMPT) - 1
        off[codec] = apart(restored, cold[codec])

    assert off["none"] < 1e-3
    assert 0 < off["q8"] < 0.1
    assert off["q8"] < off["q4"] < 2


@pytest.mark.thorough
@pytest.mark.parametrize("fits", [False, True], ids=["the checksum is the old one", "the checksum is made to fit"])
def test_an_end_of_a_group_that_was_changed_is_noticed_by_the_checksum(engines: Engines, *, fits: bool) -> None:
    """Where it fits the answer is another one: what is changed here is really used."""
    with engines.start("q8") as engine:
        ref, cold = engines.saved(engine)
    engines.sidecar.kill()
    if fits:
        engines.sidecar.flip_bytes(rewrite_checksum=True)
    else:
        for path in engines.sidecar.block_files():
            _change_first_end(path)
    engines.sidecar.start()
    with engines.start("q8") as engine:
        found = engine.ask(PROMPT, load=(ref,))

    assert found["cached_tokens"] == (len(PROMPT) - 1 if fits else 0)
    if fits:
        assert apart(found, cold) > 0.2
    else:
        assert found["token_ids"] == cold["token_ids"]
        assert apart(found, cold) < 1e-3


def _change_first_end(path: Path) -> None:
    data = bytearray(path.read_bytes())
    _, start = decode_header(memoryview(data))
    data[start + 2] ^= 0x7F  # upper mantissa of a float32
    path.write_bytes(data)
