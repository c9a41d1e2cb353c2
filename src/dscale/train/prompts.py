"""Where the user turns of a training corpus come from: openers the target completes itself, and made-up problems.

Three sources, none of them a data set:
    openers    the first words of a user turn (or none at all); the target samples the rest (self-synthesis)
    templates  word problems, code requests and documented function stubs put together from word lists (stories.py and
               code.py)
    gym        procedural tasks of the reasoning-gym package. Its `gsm_symbolic` family is left out on purpose: it is
               made from test questions of a public benchmark that the drafter is measured on.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dscale.config import InputError, require
from dscale.train import code, stories

STEPS_SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."
SUFFIXES = (
    STEPS_SUFFIX,
    STEPS_SUFFIX,
    STEPS_SUFFIX,
    "\nShow your work step by step.",
    " Explain your reasoning.",
    " Think step by step and give the final answer.",
)

HEADERS_AND_SUFFIXES = tuple(dict.fromkeys((*SUFFIXES, *(header + "```python\n" for header in code.HEADERS))))

MATH_OPENERS = (
    "", "A store sells", "A farmer has", "A school has", "A train travels", "A bakery", "A car", "A company",
    "A class of",
    "A box contains", "A recipe calls for", "A book has", "A factory", "A garden", "A movie ticket costs",
    "A restaurant",
    "A group of friends", "If a", "If", "There are", "In a", "How many", "How much", "Each", "Every day,",
    "Every week,",
    "The price of", "The sum of", "The total", "Two", "Three friends", "My", "At the", "During", "On Monday,",
    "Last year,",
    "It takes", "Half of", "Twice as many", "The cost of", "A rectangle has", "Calculate", "Find the", "Solve",
    "What is",
)  # fmt: skip
CODE_OPENERS = (
    "Write a python function to", "Write a python function to find", "Write a python function to check",
    "Write a function to",
    "Write a function that", "Write a function to find", "Write a function to count", "Write a function to check if",
    "Write a function to convert", "Write a function to remove", "Write a function to sort", "Write a function which",
    "Write a Python program", "Write a Python script", "Implement", "Implement a function", "Create a Python function",
    "Create a class", "Given a list of", "Given a string", "Given an array", "Given two", "Develop a",
    "Design an algorithm",
    "How do I", "Fix the following code:", "Write a SQL query", "Write a program in C++", "Write a JavaScript function",
    "Write a recursive function", "Define a function", "Using Python,", "Complete the following function:",
)  # fmt: skip
STUB_OPENERS = (
    "def", "from typing import List\n\n\ndef", "from typing import List, Tuple\n\n\ndef", "\n\ndef",
    "import math\n\n\ndef",
    "from typing import List, Optional\n\n\ndef", "from typing import Dict, List\n\n\ndef", "\ndef is_", "\ndef count_",
    "\ndef get_", "\ndef find_", "\ndef sum_", "\ndef max_", "\ndef sort_", "\ndef remove_",
)  # fmt: skip
GENERAL_OPENERS = (
    "", "", "", "", "Explain", "Describe", "Write", "Write a short story", "Write a poem", "Write an essay",
    "Write an email",
    "Write a letter", "Write a blog post", "Write a speech", "Write a review", "Compose", "Draft", "Imagine",
    "Imagine you are",
    "Pretend", "Pretend to be", "Suppose", "Act as", "You are", "Please", "Can you", "Could you", "I need",
    "I want to", "I'm",
    "What", "What are", "What is the difference between", "What would happen if", "How", "How does", "How can I", "Why",
    "Why do", "Who", "Which", "When", "Where", "Is it", "Are", "Do", "Should", "Tell me", "Give me",
    "Give an example of", "List",
    "Name three", "Compare", "Contrast", "Discuss", "Analyze", "Evaluate", "Summarize", "Rewrite", "Paraphrase",
    "Translate",
    "Edit", "Correct the grammar", "Classify", "Identify", "Extract", "Read the following", "Given the following",
    "Based on",
    "Provide", "Suggest", "Recommend", "Create", "Design", "Develop a plan", "Outline", "Generate", "Brainstorm",
    "In the",
    "The", "Some people", "As a", "Help me", "Let's", "Consider", "Define", "Argue", "Make a list of", "Plan",
    "Prove", "Choose",
)  # fmt: skip

GYM_FAMILIES = (
    "basic_arithmetic", "calendar_arithmetic", "chain_sum", "complex_arithmetic", "count_bits", "count_primes",
    "decimal_arithmetic", "decimal_chain_sum", "dice", "fraction_simplification", "gcd", "lcm", "leg_counting",
    "number_filtering",
    "number_format", "number_sequence", "number_sorting", "power_function", "prime_factorization", "products",
    "simple_equations",
    "polynomial_equations", "polynomial_multiplication", "simple_geometry", "simple_integration", "time_intervals",
    "bitwise_arithmetic", "base_conversion", "caesar_cipher", "letter_counting", "word_sorting", "spell_backward",
    "sentence_reordering",
    "family_relationships", "propositional_logic", "syllogism", "aiw", "knights_knaves", "coin_flip",
)  # fmt: skip


@dataclass(frozen=True)
class Script:
    """A user turn, or its beginning. complete False: the target samples on from `text`; suffix is put after the turn.

    context: earlier messages of the conversation as (role, content), a system message first if there is one.
    """

    text: str
    complete: bool
    suffix: str = ""
    source: str = "openers"
    context: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PromptMix:
    """Shares of the sources, relative weights. suffixed: share of math-like turns that carry an instruction suffix."""

    general: float = 0.27
    math: float = 0.20
    names: float = 0.12
    code: float = 0.12
    stubs: float = 0.08
    stories: float = 0.09
    gym: float = 0.03
    requests: float = 0.05
    functions: float = 0.04
    suffixed: float = 0.6
    seed: int = 0
    gym_families: tuple[str, ...] = GYM_FAMILIES

    def __post_init__(self) -> None:
        for name in SOURCES:
            require(getattr(self, name) >= 0, f"mix.{name}: {getattr(self, name)} must be 0 or more")
        require(
            sum(getattr(self, name) for name in SOURCES) > 0, "mix: all shares are 0; at least one must be positive"
        )
        require(0 <= self.suffixed <= 1, f"mix.suffixed: {self.suffixed} must lie in [0, 1]")


def _suffix(rng: random.Random, mix: PromptMix) -> str:
    return rng.choice(SUFFIXES) if rng.random() < mix.suffixed else ""


def _math(rng: random.Random, mix: PromptMix) -> Script:
    return Script(rng.choice(MATH_OPENERS), False, _suffix(rng, mix), "math")


def _names(rng: random.Random, mix: PromptMix) -> Script:
    """A name and a first verb: the start of a word problem."""
    text = f"{rng.choice(stories.NAMES)} {rng.choice(stories.OPENING_VERBS)}"
    return Script(text, False, _suffix(rng, mix), "names")


def _general(rng: random.Random, mix: PromptMix) -> Script:
    return Script(rng.choice(GENERAL_OPENERS), False, "", "general")


def _code(rng: random.Random, mix: PromptMix) -> Script:
    return Script(rng.choice(CODE_OPENERS), False, "", "code")


def _stubs(rng: random.Random, mix: PromptMix) -> Script:
    return Script(rng.choice(code.HEADERS) + "```python\n" + rng.choice(STUB_OPENERS), False, "", "stubs")


def _stories(rng: random.Random, mix: PromptMix) -> Script:
    return Script(stories.story(rng), True, _suffix(rng, mix), "stories")


def _requests(rng: random.Random, mix: PromptMix) -> Script:
    return Script(code.request(rng), True, "", "requests")


def _functions(rng: random.Random, mix: PromptMix) -> Script:
    return Script(code.documented_stub(rng), True, "", "functions")


def _gym_cycle(mix: PromptMix) -> Iterator[str]:
    """Questions of the gym families in turn, each family's own generator seeded by the mix."""
    try:
        import reasoning_gym
    except ImportError:
        raise InputError(
            "mix.gym: the reasoning-gym package is not installed; install it or set the share to 0"
        ) from None
    size = 1 << 20
    makers = []
    for name in mix.gym_families:
        try:
            makers.append(reasoning_gym.create_dataset(name, seed=mix.seed, size=size))
        except ValueError:
            continue  # a family that this version of the package does not have
    require(bool(makers), f"mix.gym_families: none of {mix.gym_families} is known to the installed reasoning-gym")
    for index in range(size):
        for maker in makers:
            yield str(maker[index]["question"])


OPENERS = ("general", "math", "names", "code", "stubs")  # completed by the target
TEMPLATES = ("stories", "requests", "functions")
EXHAUSTED = 5000  # repeated turns in a row after which the sources count as used up
SOURCES: dict[str, Callable[[random.Random, PromptMix], Script] | None] = {
    "general": _general,
    "math": _math,
    "names": _names,
    "code": _code,
    "stubs": _stubs,
    "stories": _stories,
    "gym": None,
    "requests": _requests,
    "functions": _functions,
}


def scripts(mix: PromptMix) -> Iterator[Script]:
    """An endless stream of scripts in the mix's proportions, deterministic in mix.seed.

    Complete turns do not repeat; InputError when the sources have no new ones to give.
    """
    rng = random.Random(mix.seed)
    names = list(SOURCES)
    weights = [getattr(mix, name) for name in names]
    questions = _gym_cycle(mix) if mix.gym > 0 else iter(())
    seen: set[str] = set()
    misses = 0
    while True:
        name = rng.choices(names, weights)[0]
        make = SOURCES[name]
        script = make(rng, mix) if make else Script(next(questions), True, _suffix(rng, mix), "gym")
        if script.complete and script.text in seen:
            misses += 1
            require(
                misses < EXHAUSTED,
                f"prompts: the sources asked for hold about {len(seen)} different turns; ask for fewer",
            )
            continue
        if script.complete:
            seen.add(script.text)
        misses = 0
        yield script


def gym_at_hand() -> bool:
    """True when the reasoning-gym package is installed."""
    return importlib.util.find_spec("reasoning_gym") is not None


def only(names: tuple[str, ...], seed: int) -> PromptMix:
    """The default mix with all other sources left out."""
    return PromptMix(seed=seed, **{name: 0.0 for name in SOURCES if name not in names})  # type: ignore[arg-type]
