"""A tour on the embedded model, in under two minutes on two CPU cores: `make demo`.

Every command is printed above its answer, which is computed live. Seeds are fixed, so two runs on one machine print the
same.
"""

from __future__ import annotations

import shlex
import sys

from acgpt.cli.main import app

BLANK = ("-n", "3", "--temperature", "0.5", "--seed", "1")
TOUR: tuple[tuple[str, str, tuple[tuple[str, ...], ...]], ...] = (
    (
        "1. How likely is a text?",
        "The model is SmolLM2-135M-Instruct, on this machine, with an adapter trained to read the future. On first\n"
        "use it is unpacked into a cache, which takes half a minute. Braces mark what is asked; the rest is given.\n"
        "Surprise is in bits: 0 is certain, 1 a coin toss, 10 one in a thousand. After France, Paris is no surprise.",
        (("score", "The capital of {{France}} is {{Paris}}.", "--no-future"),),
    ),
    (
        "2. Which alternative fits best?",
        "The clue may come after the slot: the probabilities of whole texts are compared.\n"
        "This is exact with any causal model that acgpt loads.",
        (
            ("rank", "The {{violinist|butcher|pilot}} tuned her violin before the concert."),
            ("rank", "The keys to the cabinet {{are|is}} on the table."),
            ("rank", "It was snowing, so he put on his {{gloves|sunglasses|swimsuit}}."),
        ),
    ),
    (
        "3. What could come here?",
        "{{_14}} is a blank of 14 tokens. The same seed gives the same samples.",
        (("infill", "Once upon a time there was a little{{_14}}", *BLANK),),
    ),
    (
        "4. The past, given the future",
        "Here the clue, “Rome”, comes after the slot. Left to right the model cannot see it. By default the adapter\n"
        "answers, which was trained to read copies of all given tokens. {{_}} is a gap of any length.",
        (
            ("score", "The capital of {{Italy}} is Rome."),
            ("infill", "She went to the{{_1}} to borrow some books.", *BLANK, "--no-future"),
            ("infill", "She went to the{{_1}} to borrow some books.", *BLANK),
            ("infill", "After the war he moved to {{_}}, where he learnt to speak Japanese.", "-n", "3", "--seed", "1"),
            ("infill", "class Basket:\n    def __init__(self):\n        {{_}}\n\n    def add(self, price):\n"
                       "        self.prices.append(price)\n", "--seed", "1"),
        ),
    ),
)  # fmt: skip
NEXT = """What to try next
Your own sentences, from the shell (in .venv/bin, if `make` installed it):
    acgpt infill 'The three most important things in life are{{_16}}' -n 3 --temperature 0.7
    acgpt show   'The capital of {{Italy}} is Rome.'        # the input of the model
    acgpt score  --model FOLDER_OR_HUB_ID 'Another {{model}}.'
    acgpt --help
    acgpt serve                                            # then open http://127.0.0.1:8080 in a browser"""


def main() -> int:
    """Run the tour; return the exit code."""
    for heading, explanation, commands in TOUR:
        print(f"---- {heading}\n{explanation}\n", flush=True)
        for command in commands:
            print(f"$ acgpt {shlex.join(command)}", flush=True)
            if code := app(command, standalone_mode=False):
                return int(code)
    print(f"---- {NEXT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
