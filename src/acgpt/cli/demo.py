"""A tour on the embedded model, in under two minutes on two CPU cores: `python -m acgpt.cli.demo`.

Every answer is computed when it is shown, and stands under the Python call that gives it. Seeds are fixed, so two runs
on one machine print the same.
"""

from __future__ import annotations

import sys
import time

from rich.text import Text

from acgpt.cli.ui import ascii_fallback, silence_libraries
from acgpt.errors import InputError


def tour() -> None:
    """Score, rank and infill; then the past given the future, and what knowing it is worth."""
    ascii_fallback()
    silence_libraries()
    from acgpt.cli.demo_table import demo_texts, print_worth, worth
    from acgpt.display.show import Page, print_ranking, print_samples, print_score
    from acgpt.models.loading import load

    page = Page()

    def say(heading: str, explanation: str) -> None:
        page.rule(Text(heading, "bold"), align="left")
        page.note(explanation + "\n", "")

    def call(code: str) -> None:
        page.note(f">>> {code}", "cyan")

    say(
        "The model",
        "SmolLM2-135M-Instruct, a small ordinary language model, on this machine, with an adapter that has taught it\n"
        "to read the future. The first time, it is unpacked into a cache, which takes half a minute.",
    )
    call("lm = acgpt.load()")
    started = time.perf_counter()
    lm = load()
    page.note(f"loaded on {lm.model.device} in {time.perf_counter() - started:.0f} s\n")

    say(
        "1. How likely is a text?",
        "Braces mark what is asked; the rest is given. Surprise is in bits: 0 is certain, 1 a coin toss, 10 one in\n"
        "a thousand. Many countries could stand first; once it is France, Paris is no surprise.",
    )
    template = "The capital of {{France}} is {{Paris}}."
    call(f'lm.log_prob("{template}", future=False)')
    print_score(page, lm, template, {"past only": lm.log_prob(template, future=False)})

    say(
        "2. Which alternative fits best?",
        "The clue may stand after the slot: the probabilities of the whole texts are compared, so all of it counts.\n"
        "That is exact with any causal model.",
    )
    for template in (
        "The {{violinist|butcher|pilot}} tuned her violin before the concert.",
        "The keys to the cabinet {{are|is}} on the table.",
        "It was snowing, so he put on his {{gloves|sunglasses|swimsuit}}.",
    ):
        call(f'lm.rank("{template}")')
        print_ranking(page, template, lm.rank(template))

    say("3. What could stand here?", "{{_14}} is a blank of 14 tokens. The same seed draws the same samples.")
    template = "Once upon a time there was a little{{_14}}"
    call(f'lm.sample("{template}", n=3, temperature=0.7, seed=1)')
    print_samples(page, lm, lm.sample(template, n=3, temperature=0.7, seed=1))

    say(
        "4. The past, given the future",
        "Here the clue, “Rome”, stands after the blank. Read left to right (future=False) the model cannot see it.\n"
        "Otherwise its adapter answers, which has learnt to read copies of all that is given, and is shown them:\n"
        "acgpt uses the future wherever a model says that it can.",
    )
    template = "The capital of {{Italy}} is Rome."
    call(f'lm.log_prob("{template}", future=False), lm.log_prob("{template}")')
    ways: dict[str, bool | None] = {"past only": False, "with future": None}
    print_score(page, lm, template, {name: lm.log_prob(template, future=way) for name, way in ways.items()})
    for template in (
        "She went to the{{_1}} to borrow some books.",
        "After the war he moved to{{_1}}, where he learnt to speak Japanese.",
        "class Basket:\n    def __init__(self):\n        {{_6}}\n\n    def add(self, price):\n"
        "        self.prices.append(price)\n",
    ):
        for way in ways.values():
            wanted = "" if way is None else f", future={way}"
            n = 1 if "\n" in template else 3
            call(f"lm.sample({template!r}, n={n}, temperature=0.5, seed=1{wanted})")
            print_samples(page, lm, lm.sample(template, n=n, temperature=0.5, seed=1, future=way))

    say(
        "5. What is the future worth?",
        "Six passages of prose and six of code, written for this tour, with a gap each and a clue after it: the\n"
        "perplexity of what stands in the gaps (lower is better). Without its adapter the model makes little of the\n"
        "copies, or stumbles over them.",
    )
    print_worth(page, worth(lm, demo_texts()))

    say("What to try next", "Your own sentences, from the shell (in .venv/bin, if `make` installed it):")
    for command in (
        "acgpt score  'The opposite of hot is {{cold}}.'",
        "acgpt rank   'She has lived in Paris {{for|since|at}} ten years.'",
        "acgpt infill 'The three most important things in life are{{_16}}' -n 3 --temperature 0.7",
        "acgpt infill 'He was a famous{{_2}}, and his paintings hang in the Louvre.' -n 5",
        "acgpt show   'The capital of {{Italy}} is Rome.'        # what the model is told, drawn",
        "acgpt score  --model FOLDER_OR_HUB_ID 'Another {{model}}.'",
        "acgpt --help",
    ):
        page.note(f"    {command}", "cyan")


def main() -> int:
    """Run the tour. Returns the exit code."""
    try:
        tour()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
