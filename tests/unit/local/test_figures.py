"""The figures of the demo: pure arithmetic on answers."""

from deploy.local.demo import StoryStep
from deploy.local.gateway_client import Answer


def test_a_step_without_an_answer_shows_dashes():
    assert StoryStep("delete").cells() == ["delete", "-", "-", "-", "-"]


def test_a_step_shows_what_its_answer_said():
    context = {"computed_tokens": 1, "cached_tokens": 1449, "source": "disk", "restore_ms": 40.5}
    step = StoryStep.of("restored", Answer(usage={"prompt_tokens": 1, "context": context}, ttft_ms=61.23))

    assert step.cells() == ["restored", "1", "1449", "disk", "61.2"]
