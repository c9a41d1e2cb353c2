"""Sources of prompts: deterministic, unrepeated, in proportion, and the made-up examples are true."""

import itertools
import random
import re

import pytest

from dscale.config import InputError
from dscale.train import code, prompts
from dscale.train.prompts import OPENERS, PromptMix, only, scripts

NO_GYM = {"gym": 0.0}


def take(count, **mix):
    return list(itertools.islice(scripts(PromptMix(**(NO_GYM | mix))), count))


def test_the_stream_is_deterministic_and_complete_turns_do_not_repeat():
    first, again, other = take(400), take(400), take(400, seed=1)
    assert first == again
    assert first != other
    complete = [s.text for s in first if s.complete]
    assert len(complete) == len(set(complete)) > 20


def test_shares_are_followed():
    only = dict.fromkeys(("general", "names", "code", "stubs", "gym", "requests", "functions"), 0.0)
    made = take(600, **only, math=1.0, stories=3.0, suffixed=0.5)
    assert {s.source for s in made} == {"math", "stories"}
    assert 400 < sum(s.source == "stories" for s in made) < 500
    assert 230 < sum(bool(s.suffix) for s in made) < 370


def test_docstring_examples_are_what_the_functions_give():
    rng = random.Random(0)
    by_name = {stub.name: stub for stub in code.STUBS}
    checked = 0
    for _ in range(200):
        text = code.documented_stub(rng)
        name = re.search(r"def (\w+)\(", text).group(1)
        stub = next(by_name[n] for n in sorted(by_name, key=len, reverse=True) if name.endswith(n))
        for arguments, result in re.findall(rf">>> {name}\((.*)\)\n    (.*)\n", text):
            drawn = eval(f"({arguments},)")
            assert repr(stub.compute(*drawn)) == result
            checked += 1
    assert checked > 200


def test_a_mix_without_shares_is_refused():
    nothing = dict.fromkeys(
        ("general", "math", "names", "code", "stubs", "stories", "gym", "requests", "functions"), 0.0
    )
    with pytest.raises(InputError, match="all shares are 0"):
        PromptMix(**nothing)


def test_gym_questions_come_from_its_families():
    pytest.importorskip("reasoning_gym")
    made = take(8, gym=1.0, general=0, math=0, names=0, code=0, stubs=0, stories=0, requests=0, functions=0)
    assert all(s.source == "gym" and s.complete and s.text for s in made)


def test_sources_that_are_used_up_say_so_instead_of_searching_on(monkeypatch):
    monkeypatch.setattr(prompts, "EXHAUSTED", 50)
    monkeypatch.setitem(prompts.SOURCES, "stories", lambda rng, mix: prompts.Script(f"{rng.randrange(4)}", True))
    with pytest.raises(InputError, match="hold about 4 different turns"):
        list(itertools.islice(scripts(only(("stories",), 0)), 5))


def test_only_keeps_the_named_sources():
    made = list(itertools.islice(scripts(only(OPENERS, 0)), 100))
    assert {script.source for script in made} == set(OPENERS)
