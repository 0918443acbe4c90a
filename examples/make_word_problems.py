"""Writes word_problems.jsonl: 500 word problems of one step, in the form of GSM8K ({question, answer}; the answer ends in `#### 7`).

Run it as `python examples/make_word_problems.py > examples/word_problems.jsonl`. Equal seeds give equal problems.
"""

import json
import random
import sys
from collections.abc import Iterator

NUM, SEED = 500, 7
NAMES = (
    "Anna",
    "Ben",
    "Chloe",
    "David",
    "Emma",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Leo",
    "Mona",
    "Nils",
)
THINGS = (
    "apples",
    "books",
    "coins",
    "pens",
    "cards",
    "eggs",
    "stamps",
    "shells",
    "balls",
    "cups",
    "stones",
    "stickers",
)
MORE = (
    "{name} has {a} {things} and finds {b} more. How many {things} does {name} have now?",
    "{name} has {a} {things}. {other} gives {name} {b} more. How many {things} does {name} have now?",
    "{name} has {a} {things} and {other} has {b}. How many {things} do they have together?",
)
FEWER = (
    "{name} has {a} {things} and loses {b}. How many {things} are left?",
    "{name} has {a} {things} and gives {b} to {other}. How many {things} does {name} have left?",
)
TIMES = ("{name} has {a} bags with {b} {things} in each. How many {things} does {name} have?",)


def problem(rng: random.Random) -> dict[str, str]:
    """Return one problem: sums and differences up to 12, and a few products up to 16."""
    kind = rng.choices((MORE, FEWER, TIMES), (6, 4, 1))[0]
    a, b = rng.randint(2, 8), rng.randint(1, 4)
    if kind is FEWER and a <= b:
        a, b = b + 1, a
    if kind is TIMES:
        a, b = rng.randint(2, 4), rng.randint(2, 4)
    sign, result = {MORE: ("+", a + b), FEWER: ("-", a - b), TIMES: ("*", a * b)}[kind]
    name, other = rng.sample(NAMES, 2)
    question = rng.choice(kind).format(name=name, other=other, things=rng.choice(THINGS), a=a, b=b)
    return {"question": question, "answer": f"{a} {sign} {b} = {result}\n#### {result}"}


def problems(rng: random.Random) -> Iterator[dict[str, str]]:
    """Yield problems, each question once."""
    seen = set()
    while True:
        one = problem(rng)
        if one["question"] not in seen:
            seen.add(one["question"])
            yield one


def main() -> None:
    """Write the problems to standard output."""
    for _, one in zip(range(NUM), problems(random.Random(SEED)), strict=False):
        sys.stdout.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    main()
