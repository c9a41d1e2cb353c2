"""Made-up coding tasks: one-line requests, and function stubs with a docstring and examples that were really "
"computed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

HEADERS = (
    "Write a solution to the following problem and make sure that it passes the tests:\n",
    "Write a solution to the following problem and make sure that it passes the tests:\n",
    "Write a solution to the following problem and make sure that it passes the tests:\n",
    "Complete the following Python function:\n",
    "Finish this function so that the examples hold:\n",
)
ASKS = (
    "Write a python function to", "Write a python function to", "Write a function to", "Write a function to",
    "Write a function that can", "Write a Python program to", "Create a function to", "Implement a function to",
)  # fmt: skip
CONTAINERS = (
    "list", "tuple", "array", "list of integers", "list of numbers", "list of strings", "list of tuples",
    "nested list", "matrix",
    "dictionary", "set", "sorted array", "list of floats", "string", "sentence", "linked list", "queue", "binary tree",
)  # fmt: skip
QUANTITIES = (
    "sum", "product", "average", "median", "mode", "range", "maximum", "minimum", "second largest", "second smallest",
    "kth largest",
    "number of distinct values", "largest gap", "variance", "longest run", "running total",
    "difference between the ends",
)  # fmt: skip
FILTERS = (
    "even numbers", "odd numbers", "prime numbers", "negative numbers", "duplicate elements", "unique elements",
    "empty strings",
    "multiples of a given number", "vowels", "digits", "words longer than a given length", "repeated characters",
    "uppercase letters",
    "palindromes", "perfect squares", "elements at even positions", "zeros", "common elements", "adjacent pairs",
    "whitespace characters",
)  # fmt: skip
PROPERTIES = (
    ("number", ("prime", "a perfect square", "even", "a power of two", "divisible by its digit sum", "a palindrome",
    "triangular",
                "a factorial", "positive", "an integer", "a multiple of seven", "abundant", "a cube")),
    ("string", ("a palindrome", "in lower case", "a valid email address", "made of digits only", "a valid date",
    "empty", "a pangram",
                "balanced in its brackets", "an anagram of another one", "sorted alphabetically",
                "a valid identifier")),
    ("list", ("sorted", "empty", "symmetric", "strictly increasing", "made of equal elements", "a permutation",
    "free of duplicates")),
    ("matrix", ("square", "symmetric", "diagonal", "an identity matrix", "upper triangular")),
    ("year", ("a leap year", "in the twentieth century")),
)  # fmt: skip
SHAPES = (
    "circle", "square", "rectangle", "triangle", "trapezoid", "rhombus", "ellipse", "regular polygon", "cube",
    "cuboid", "cylinder",
    "cone", "sphere", "pyramid", "torus", "parallelogram", "hexagon", "sector",
)  # fmt: skip
MEASURES = ("area", "perimeter", "volume", "surface area", "diagonal", "side length", "height")
CONVERSIONS = (
    ("a list", "a tuple"), ("a tuple", "a string"), ("a string", "a list of characters"), ("a decimal number",
    "binary"),
    ("a binary number", "decimal"), ("a number", "words"), ("degrees", "radians"), ("celsius", "fahrenheit"),
    ("a dictionary", "a list of pairs"),
    ("two lists", "a dictionary"), ("snake case", "camel case"), ("camel case", "snake case"), ("a roman numeral",
    "an integer"),
    ("seconds", "hours, minutes and seconds"), ("a matrix", "a flat list"), ("a date", "the day of the week"),
    ("kilometers", "miles"),
)  # fmt: skip
KEYS = (
    "length",
    "last element",
    "absolute value",
    "second item",
    "frequency",
    "first letter",
    "sum of digits",
    "value in descending order",
)


def request(rng: random.Random) -> str:
    """A one-line request for a function."""
    container = rng.choice(CONTAINERS)
    kind, properties = rng.choice(PROPERTIES)
    given, wanted = rng.choice(CONVERSIONS)
    body = rng.choice(
        (
            f"find the {rng.choice(QUANTITIES)} of a given {container}",
            f"find the {rng.choice(QUANTITIES)} of the {rng.choice(FILTERS)} in a given {container}",
            f"count the {rng.choice(FILTERS)} in a {container}",
            f"remove {rng.choice(FILTERS)} from a given {container}",
            f"extract the {rng.choice(FILTERS)} of a {container} into a new one",
            f"move all {rng.choice(FILTERS)} of a {container} to the end",
            f"replace the {rng.choice(FILTERS)} in a {container} with a given value",
            f"check whether a given {kind} is {rng.choice(properties)}",
            f"check if the given {kind} is {rng.choice(properties)} or not",
            f"convert {given} to {wanted}",
            f"calculate the {rng.choice(MEASURES)} of a {rng.choice(SHAPES)}",
            f"sort a {container} by {rng.choice(KEYS)}",
            f"merge two {container}s and keep the {rng.choice(FILTERS)}",
            f"rotate a {container} by {rng.randint(2, 9)} positions",
            f"split a {container} into chunks of size {rng.randint(2, 9)}",
            f"find the first {rng.choice(('n', 'k', str(rng.randint(3, 20))))} {rng.choice(FILTERS[:4])} greater "
            "than a given number",
            f"group the items of a {container} by {rng.choice(KEYS)}",
            f"find the {rng.choice(FILTERS)} that occur in both of two {container}s",
        )
    )
    end = rng.choice(
        (
            ".",
            ".",
            ".",
            "",
            " using recursion.",
            " without using built-in functions.",
            " using a loop.",
            " in one line.",
        )
    )
    return f"{rng.choice(ASKS)} {body}{end}"


class Stub(NamedTuple):
    """A documented function: its signature, what the docstring says, how it is computed and how inputs are drawn."""

    name: str
    signature: str
    text: str
    compute: Callable[..., Any]
    draw: Callable[[random.Random], tuple[Any, ...]]


def _ints(rng: random.Random) -> list[int]:
    return [rng.randint(-20, 50) for _ in range(rng.randint(3, 7))]


def _words(rng: random.Random) -> list[str]:
    pool = (
        "stone",
        "river",
        "lamp",
        "apple",
        "cloud",
        "tiger",
        "violin",
        "map",
        "ocean",
        "seed",
        "winter",
        "door",
        "ant",
    )
    return rng.sample(pool, rng.randint(2, 5))


def _text(rng: random.Random) -> str:
    return " ".join(_words(rng))


STUBS = (
    Stub("double_all", "numbers: List[int]) -> List[int]", "Return a list in which every number is doubled.",
         lambda x: [2 * v for v in x], lambda r: (_ints(r),)),
    Stub("keep_above", "numbers: List[int], limit: int) -> List[int]",
    "Keep only the numbers that are greater than limit.",
         lambda x, t: [v for v in x if v > t], lambda r: (_ints(r), r.randint(0, 20))),
    Stub("count_even", "numbers: List[int]) -> int", "Count how many of the numbers are even.",
         lambda x: sum(v % 2 == 0 for v in x), lambda r: (_ints(r),)),
    Stub("sum_of_odds", "numbers: List[int]) -> int", "Return the sum of all odd numbers in the list.",
         lambda x: sum(v for v in x if v % 2), lambda r: (_ints(r),)),
    Stub("spread", "numbers: List[int]) -> int", "Return the difference between the largest and the smallest number.",
         lambda x: max(x) - min(x), lambda r: (_ints(r),)),
    Stub("pair_sums", "numbers: List[int]) -> List[int]", "Return the sum of each number and the one after it.",
         lambda x: [a + b for a, b in itertools.pairwise(x)], lambda r: (_ints(r),)),
    Stub("running_minimum", "numbers: List[int]) -> List[int]",
    "From a list of integers, return the smallest number seen so far.",
         lambda x: [min(x[: i + 1]) for i in range(len(x))], lambda r: (_ints(r),)),
    Stub("without_repeats", "numbers: List[int]) -> List[int]",
    "Drop numbers that occurred before, keeping the order of the rest.",
         lambda x: list(dict.fromkeys(x)), lambda r: ([r.randint(1, 5) for _ in range(6)],)),
    Stub("join_words", "words: List[str], mark: str) -> str", "Join the words into one string with mark between them.",
         lambda w, m: m.join(w), lambda r: (_words(r), r.choice("-+/_"))),
    Stub("longest_word", "words: List[str]) -> str",
    "Return the longest word. If there are several, return the first of them.",
         lambda w: max(w, key=len), lambda r: (_words(r),)),
    Stub("word_lengths", "text: str) -> List[int]", "Return the length of every word of the text, in order.",
         lambda t: [len(w) for w in t.split()], lambda r: (_text(r),)),
    Stub("capitals", "text: str) -> str", "Give every word of the text a capital first letter.", lambda t: t.title(),
    lambda r: (_text(r),)),
    Stub("count_vowels", "text: str) -> int", "Count the vowels a, e, i, o and u in the text.",
         lambda t: sum(c in "aeiou" for c in t), lambda r: (_text(r),)),
    Stub("backwards", "text: str) -> str", "Return the text with its words in reverse order.",
         lambda t: " ".join(reversed(t.split())), lambda r: (_text(r),)),
    Stub("letter_counts", "text: str) -> Dict[str, int]", "Count how often each letter occurs, spaces left out.",
         lambda t: {c: t.count(c) for c in sorted(set(t.replace(" ", "")))}, lambda r: (r.choice(_words(r)),)),
    Stub("digit_sum", "n: int) -> int", "Return the sum of the digits of n.", lambda n: sum(map(int, str(n))),
    lambda r: (r.randint(10, 99999),)),
    Stub("is_even_length", "text: str) -> bool", "Tell whether the number of characters is even.",
    lambda t: len(t) % 2 == 0, lambda r: (_text(r),)),
    Stub("divisors", "n: int) -> List[int]", "Return all divisors of n in ascending order.",
         lambda n: [d for d in range(1, n + 1) if n % d == 0], lambda r: (r.randint(4, 60),)),
    Stub("to_binary", "n: int) -> str", "Return the binary digits of n without a prefix.", lambda n: bin(n)[2:],
    lambda r: (r.randint(2, 200),)),
    Stub("clamp", "value: float, low: float, high: float) -> float", "Limit value to the range from low to high.",
         lambda v, a, b: max(a, min(v, b)), lambda r: (round(r.uniform(-5, 15), 1), 0.0, 10.0)),
    Stub("mean", "numbers: List[float]) -> float", "Return the arithmetic mean of the numbers.",
         lambda x: sum(x) / len(x), lambda r: ([float(r.randint(1, 9)) for _ in range(4)],)),
    Stub("common", "first: List[int], second: List[int]) -> List[int]",
    "Return the sorted numbers that are in both lists.",
         lambda a, b: sorted(set(a) & set(b)), lambda r: ([r.randint(1, 6) for _ in range(5)], [r.randint(1,
         6) for _ in range(5)])),
    Stub("every_second", "items: List[int]) -> List[int]", "Return every second item, starting with the first.",
         lambda x: x[::2], lambda r: (_ints(r),)),
    Stub("last_k", "items: List[int], k: int) -> List[int]", "Return the last k items.", lambda x, k: x[-k:],
    lambda r: (_ints(r), r.randint(1, 3))),
    Stub("mirror", "text: str) -> str", "Append the reverse of the text to the text.", lambda t: t + t[::-1],
    lambda r: (r.choice(_words(r)),)),
    Stub("below_zero_at", "changes: List[int]) -> int",
    "Return the first index at which the running sum is negative, or -1.",
         lambda x: next((i for i in range(len(x)) if sum(x[: i + 1]) < 0), -1), lambda r: (_ints(r),)),
)  # fmt: skip
VERBS = ("", "get_", "make_", "compute_", "find_", "return_", "list_", "my_", "fast_", "simple_")


def documented_stub(rng: random.Random) -> str:
    """A header and one or two Python stubs with docstring examples, in a fenced block."""
    stub = rng.choice(STUBS)
    name = rng.choice(VERBS) + stub.name
    needs_typing = (
        "from typing import Dict, List\n\n\n" if "List" in stub.signature or "Dict" in stub.signature else "\n\n"
    )
    examples = ""
    for _ in range(rng.randint(1, 3)):
        drawn = stub.draw(rng)
        examples += f"    >>> {name}({', '.join(map(repr, drawn))})\n    {stub.compute(*drawn)!r}\n"
    docstring = f'    """ {stub.text}\n{examples}    """\n'
    return f"{rng.choice(HEADERS)}```python\n{needs_typing}def {name}({stub.signature}:\n{docstring}\n```"
