"""A tour on the embedded model, in under two minutes on two CPU cores: `python -m acgpt.cli.demo`.

Every answer is computed live, and printed below the Python call. Seeds are fixed, so two runs on one machine print the
same.
"""

from __future__ import annotations

import sys
import time

from rich.text import Text

from acgpt.cli.ui import replace_unprintable, silence_libraries
from acgpt.errors import InputError


def tour() -> None:
    """Show score, rank and infill, the past given the future, and the gain from the future."""
    replace_unprintable()
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
        "SmolLM2-135M-Instruct, a small ordinary language model, on this machine, with an adapter trained to\n"
        "read the future. On first use it is unpacked into a cache, which takes half a minute.",
    )
    call("lm = acgpt.load()")
    started = time.perf_counter()
    lm = load()
    page.note(f"loaded on {lm.model.device} in {time.perf_counter() - started:.0f} s\n")

    say(
        "1. How likely is a text?",
        "Braces mark what is asked; the rest is given. Surprise is in bits: 0 is certain, 1 a coin toss, 10 one in\n"
        "a thousand. Many countries are possible first; after France, Paris is no surprise.",
    )
    template = "The capital of {{France}} is {{Paris}}."
    call(f'lm.log_prob("{template}", future=False)')
    print_score(page, lm, template, {"past only": lm.log_prob(template, future=False)})

    say(
        "2. Which alternative fits best?",
        "The clue may come after the slot: the probabilities of whole texts are compared.\n"
        "This is exact with any causal model.",
    )
    for template in (
        "The {{violinist|butcher|pilot}} tuned her violin before the concert.",
        "The keys to the cabinet {{are|is}} on the table.",
        "It was snowing, so he put on his {{gloves|sunglasses|swimsuit}}.",
    ):
        call(f'lm.rank("{template}")')
        print_ranking(page, template, lm.rank(template))

    say("3. What could come here?", "{{_14}} is a blank of 14 tokens. The same seed gives the same samples.")
    template = "Once upon a time there was a little{{_14}}"
    call(f'lm.sample("{template}", n=3, temperature=0.7, seed=1)')
    print_samples(page, lm, lm.sample(template, n=3, temperature=0.7, seed=1))

    say(
        "4. The past, given the future",
        "Here the clue, “Rome”, comes after the blank. Left to right (future=False) the model cannot see it.\n"
        "By default the adapter answers, which was trained to read copies of all given tokens:\n"
        "acgpt uses the future if a model was trained to.",
    )
    template = "The capital of {{Italy}} is Rome."
    call(f'lm.log_prob("{template}", future=False), lm.log_prob("{template}")')
    settings: dict[str, bool | None] = {"past only": False, "with future": None}
    print_score(page, lm, template, {name: lm.log_prob(template, future=future) for name, future in settings.items()})
    for template in (
        "She went to the{{_1}} to borrow some books.",
        "After the war he moved to{{_1}}, where he learnt to speak Japanese.",
        "class Basket:\n    def __init__(self):\n        {{_6}}\n\n    def add(self, price):\n"
        "        self.prices.append(price)\n",
    ):
        for future in settings.values():
            argument = "" if future is None else f", future={future}"
            n = 1 if "\n" in template else 3
            call(f"lm.sample({template!r}, n={n}, temperature=0.5, seed=1{argument})")
            print_samples(page, lm, lm.sample(template, n=n, temperature=0.5, seed=1, future=future))

    say(
        "5. What is the future worth?",
        "Perplexity of the gaps in six passages of prose and six of code, written for this tour, with a clue after\n"
        "each gap (lower is better). Without its adapter the model gains little from copies, or gets worse.",
    )
    print_worth(page, worth(lm, demo_texts()))

    say("What to try next", "Your own sentences, from the shell (in .venv/bin, if `make` installed it):")
    for command in (
        "acgpt score  'The opposite of hot is {{cold}}.'",
        "acgpt rank   'She has lived in Paris {{for|since|at}} ten years.'",
        "acgpt infill 'The three most important things in life are{{_16}}' -n 3 --temperature 0.7",
        "acgpt infill 'He was a famous {{_}}, and his paintings hang in the Louvre.' -n 5",
        "acgpt show   'The capital of {{Italy}} is Rome.'        # the input of the model",
        "acgpt score  --model FOLDER_OR_HUB_ID 'Another {{model}}.'",
        "acgpt --help",
        "acgpt serve                                            # then open http://127.0.0.1:8080 in a browser",
    ):
        page.note(f"    {command}", "cyan")


def main() -> int:
    """Run the tour; return the exit code."""
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
