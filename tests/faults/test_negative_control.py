"""The negative control: KV that was changed under right checksums changes the answer, so stored KV really is used.

And each checksum alone is enough to notice: the file's own, and the one the manifest has of it.
"""

from __future__ import annotations

from random import Random

import httpx
import pytest

from tests.kit.faults.files import StoredFiles
from tests.kit.faults.reference import LOGPROB_TOLERANCE, ColdEngine, compare, read_answer
from tests.kit.faults.world import START_S
from tests.kit.stack import KEY, MODEL
from tests.kit.until import wait_until
from tests.kit.vouching import change_bytes, vouch_for_what_lies_there

pytestmark = pytest.mark.timeout(600)

PROMPT_TOKENS = 203
"""Three whole blocks of the sidecar and a tail."""
QUESTION = [5, 6, 7]
ANSWER_TOKENS = 8
RESTORED = ("host", "disk")


class Context:
    """One stored context, asked the same question again and again without being extended."""

    def __init__(self, stack, name):
        self.stack = stack
        self.http = httpx.Client(base_url=stack.url, headers={"authorization": f"Bearer {KEY}"}, timeout=120)
        self.engine = ColdEngine(stack.engine_urls[0])
        self.files = StoredFiles(stack.data())
        # Words of its own: blocks of the same words are shared, those that another test has spoilt among them.
        self.words = Random(name)
        self.session_id = wait_until(self._created, what="the KV is durable", deadline_s=START_S)

    def _created(self):
        """Return a new context's id once its KV is durable, "" where there is none: it goes, and another is to come.

        A connector whose sidecar has just been replaced, as by the test before, skips saves for up to ten seconds.
        """
        prompt = [self.words.randrange(256) for _ in range(PROMPT_TOKENS)]
        path = f"/v1/context/{self._post('/v1/context', {'prompt': prompt, 'ttl': 3600}).session_id}"
        state = wait_until(
            lambda: self.http.get(path).json()["holder"]["state"],
            is_so=lambda state: state in ("sealed", "absent"),
            what="the KV is durable or nowhere",
        )
        if state == "absent":
            assert self.http.delete(path).status_code == 200
        return path.rpartition("/")[2] if state == "sealed" else ""

    def ask(self):
        """Ask with nothing in the engine's own cache."""
        self.stack.forget_prefixes()
        body = {"prompt": QUESTION, "session_id": self.session_id, "context_mode": "append", "context_commit": False}
        return self._post("/v1/completions", body)

    def cold(self, answer):
        return self.engine.answer(answer.prompt_ids, max_tokens=ANSWER_TOKENS)

    def change(self, *, file_checksums, manifest_checksums):
        """Change the stored bytes while the sidecar is down; it starts with an empty memory tier."""
        self.stack.kill("sidecar")
        for path in (*self.files.on_disk("block"), *self.files.on_disk("tail")):
            change_bytes(path, reseal=file_checksums)
        if manifest_checksums:
            vouch_for_what_lies_there(self.stack.data())
        self.stack.start("sidecar")

    def quarantined(self):
        return self.stack.counted("sidecar", "contextcache_sidecar_quarantined_files_total")

    def close(self):
        assert self.http.delete(f"/v1/context/{self.session_id}").status_code == 200
        self.http.close()
        self.engine.close()

    def _post(self, path, body):
        body |= {"model": MODEL, "temperature": 0, "max_tokens": ANSWER_TOKENS, "logprobs": 1, "return_token_ids": True}
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return read_answer(response)


@pytest.fixture
def context(world, request):
    context = Context(world.stack, request.node.name)
    yield context
    context.close()


def restored(context):
    """Ask until the KV came from the sidecar: the connector may still be finding a sidecar that was just started."""
    answers = []

    def ask():
        answers.append(context.ask())
        return answers[-1].usage["context"]["source"] in RESTORED

    wait_until(ask, what="the KV comes from the sidecar")
    return answers[-1]


def test_bytes_changed_under_right_checksums_change_the_answer(context):
    """This is what makes every "equals the cold answer" of the fault tests worth something."""
    honest = restored(context)
    compare(honest, context.cold(honest))

    context.change(file_checksums=True, manifest_checksums=True)
    forged = restored(context)

    assert forged.prompt_ids == honest.prompt_ids
    assert forged.usage["context"]["cached_tokens"] == honest.usage["context"]["cached_tokens"]
    furthest = max(abs(one - other) for one, other in zip(forged.logprobs, honest.logprobs, strict=True))
    print(f"forged: {forged.token_ids}, honest: {honest.token_ids}, log-probabilities {furthest:.2g} apart")
    assert forged.token_ids != honest.token_ids or furthest > 100 * LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    "file_checksums",
    [
        pytest.param(False, id="no checksum rewritten", marks=pytest.mark.thorough),
        pytest.param(True, id="the manifest's left alone"),
    ],
)
def test_a_checksum_left_alone_is_enough_to_notice(context, file_checksums):
    """The answer is the cold one, recomputed; files are in quarantine and counted, here and in the connector.

    With no checksum left to notice, this is what the test above sees: another answer, from disk.
    """
    restored(context)
    failed_before = failed_loads(context)

    context.change(file_checksums=file_checksums, manifest_checksums=False)
    put_aside, files_before = context.quarantined(), context.files.quarantined()
    noticed = []

    def ask():
        noticed.append(context.ask())
        assert noticed[-1].usage["context"]["source"] == "recompute"
        return context.quarantined() > put_aside

    wait_until(ask, what="the bad file is noticed, not the sidecar's absence")
    for answer in noticed:
        compare(answer, context.cold(answer))
    assert len(context.files.quarantined()) > len(files_before)
    # Engines tell their counters once a second.
    wait_until(lambda: failed_loads(context) > failed_before, what="the connector has counted it")


def failed_loads(context):
    return context.stack.counted("engine", "contextcache_connector_events_total", event="failed_loads")
