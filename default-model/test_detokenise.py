"""WikiText becomes plain text again: what is certain, what is guessed, and where articles begin."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture
def detokenise(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("detokenise")


WIKITEXT = {
    'a guest @-@ starring role in " Teddy \'s Story " ;': 'a guest-starring role in "Teddy\'s Story";',
    "It cost US $ 21 @,@ 900 ( £ 4 @.@ 5 million ) , or 98 % .": "It cost US$21,900 (£4.5 million), or 98%.",
    "They don 't , I 'm told , like Xi 'an .": "They don't, I'm told, like Xi'an.",
    "the players ' bus and the ' perfect ' ironclads ' guns": "the players' bus and the 'perfect' ironclads' guns",
    "a quarter of ' first class ships ' sank": "a quarter of 'first class ships' sank",
    "They won 74 – 66 at 5 : 30 ; the film – a success — ran .": "They won 74–66 at 5:30; the film – a success—ran.",
    "38 @.@ 6 ° C ( 101 @.@ 5 ° F ) , a 30 ° slope , 43 km / h": "38.6 °C (101.5 °F), a 30° slope, 43 km/h",
    "AT & T and Simon & Schuster placed it at # 7": "AT&T and Simon & Schuster placed it at #7",
    "women ’ s ceremonies and the players ’ bus": "women’s ceremonies and the players’ bus",
    "it was [ ... ] about : nothing": "it was [...] about: nothing",
}


@pytest.mark.parametrize("written", WIKITEXT)
def test_wikitext_becomes_plain(detokenise, written):
    assert detokenise.plain(f" {written} \n") == WIKITEXT[written]


def test_wikitext_is_split_at_titles_but_not_within_a_sentence(detokenise):
    sentence = "The prototype of such a filter has a frequency of ωc"
    lines = [
        "",
        " = One = ",
        "",
        " Some text . ",
        " = = Part = = ",
        " More . ",
        f" {sentence} ",
        " = 1 and k = ",
        " 1 Ω . ",
    ]
    lines += [" = Two ( film ) = ", " Two is a film . "]
    assert list(detokenise.articles(lines)) == [
        f"One\n\nSome text.\nPart\nMore.\n{sentence}\n= 1 and k =\n1 Ω.",
        "Two (film)\n\nTwo is a film.",
    ]
