"""Stop strings: they are found in linear time, and bounded in all protocols."""

from __future__ import annotations

import random

import pytest
from fuzz import examples

from acgpt.serving.writer import Match


class CountedWord(str):
    """A string that counts how often one of its characters is looked at."""

    looks = 0

    def __getitem__(self, index):
        self.looks += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("seed", range(examples(20)))
def test_a_match_is_the_longest_beginning_of_the_word_that_the_text_ends_with(seed):
    rng = random.Random(seed)
    word, text = ("".join(rng.choices("ab", k=k)) for k in (rng.randint(1, 6), 40))
    match, read = Match(word), ""
    for part in (text[i : i + 3] for i in range(0, len(text), 3)):
        begin, read = len(read), read + part
        if (end := match.read(part)) is not None:
            assert begin + end == text.index(word) + len(word)
            break
        assert word not in read
        assert match.length == max(k for k in range(len(word)) if read.endswith(word[:k]))


def test_stop_strings_are_looked_for_in_time_linear_in_the_text():
    word, text = CountedWord("a" * 2000 + "b"), ("a" * 1999 + "c") * 2
    match = Match(word)
    for character in text:
        assert match.read(character) is None
    assert word.looks < 6 * (len(word) + len(text))


STOPPED = [
    ("/v1/completions", {"prompt": "The"}),
    ("/v1/fim/completions", {"prompt": "The"}),
    ("/infill", {"input_prefix": "The"}),
    ("/v1/fill", {"template": "The {{_}}"}),
    ("/v1/sample", {"query": "The {{_}}"}),
]


@pytest.mark.parametrize(("path", "body"), STOPPED)
@pytest.mark.parametrize("stop", [["x"] * 65, ["x" * 3000, "y" * 3000], "x" * 5000])
def test_too_many_or_too_long_stop_strings_are_refused(http, path, body, stop):
    reply = http.post(path, json={**body, "stop": stop})
    assert reply.status_code == 422 and reply.json()["error"]["param"] == "stop", reply.text
    assert "are allowed" in reply.json()["error"]["message"]
