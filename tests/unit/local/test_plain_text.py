"""Prompts to measure with."""

from deploy.local.plain_text import plain_text


def test_the_same_seed_gives_the_same_text():
    assert plain_text(1450, seed=7) == plain_text(1450, seed=7)


def test_texts_of_different_seeds_part_in_their_first_sentence():
    first, second = (plain_text(150, seed=seed).split(".")[0] for seed in (7, 8))

    assert first != second


def test_a_longer_text_has_more_sentences():
    assert plain_text(5780, seed=7).count(". ") > 3 * plain_text(1450, seed=7).count(". ")
