"""A changed body goes back to Envoy without being written and read again for each message around it."""

from pathlib import Path

from gateway.envoy import messages
from tests.kit.process_memory import memory_bytes

SIZE_BYTES = 32 << 20


def test_an_answer_holds_the_body_that_it_changes_once():
    """Seen failing before: five copies, made on the event loop in a second and more."""
    body = b"a" * SIZE_BYTES
    mutation = messages.header_mutation({"content-length": str(len(body))}, ())
    before = memory_bytes("self", "VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    answer = messages.body_answer(mutation, pod="10.0.0.1:80", body=body)

    assert memory_bytes("self", "VmHWM") - before < 2 * SIZE_BYTES
    assert answer.request_body.response.body_mutation.body == body
    assert answer.request_body.response.header_mutation == mutation
