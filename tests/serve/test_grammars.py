"""The engine loop and grammars: a new one is compiled beside the steps of the others; a wrong one is refused."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

from dscale.config import Grammar, SamplingParams
from dscale.serve.engine_process import EngineLoop
from dscale.serve.link import Closed
from dscale.serve.messages import Abort, Delta, Refused, Stop, Submit
from tests.engine.test_grammar import GRAMMARS, PROMPTS, alone, engine, params
from tests.serve.test_engine_process import Script, ScriptedLink

pytest.importorskip("xgrammar")
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def play(script: Script, slow: float = 0.0) -> ScriptedLink:
    """Runs a script; compiling takes `slow` seconds more."""
    llm, link = engine("full"), ScriptedLink(script)
    compile = llm.engine.compile

    def slowly(grammar: Grammar):
        if threading.current_thread() is not threading.main_thread():
            threading.Event().wait(slow)
        return compile(grammar)

    llm.engine.compile = slowly  # type: ignore[method-assign]
    with suppress(Closed):
        EngineLoop(llm, link, 8).run()
    assert not llm.engine.busy
    return link


def structured(id: str, index: int) -> Submit:
    return Submit(id, tuple(PROMPTS[index]), params(GRAMMARS[index], False), 0)


def test_steps_of_others_go_on_while_a_grammar_is_compiled() -> None:
    link = play({0: [Submit("plain", tuple(PROMPTS[0]), LONG, 0)], 1: [structured("json", 0)]}, slow=0.05)
    assert link.whole("json").token_ids == alone(False)[0][0]
    order = [message.id for message in link.of(Delta)]
    assert order.index("json") > 2  # the other had steps in between
    assert len(link.whole("plain").token_ids) == 40


def test_a_request_can_be_aborted_and_the_server_stopped_meanwhile() -> None:
    script = {0: [Submit("plain", tuple(PROMPTS[0]), LONG, 0)], 1: [structured("gone", 0), structured("stays", 3)]}
    link = play({**script, 2: [Abort("gone"), Stop(30.0)]}, slow=0.1)
    assert {message.id for message in link.of(Delta)} == {"plain", "stays"}
    assert link.whole("stays").token_ids == alone(False)[3][0]


@pytest.mark.parametrize("busy", [False, True])
def test_wrong_grammars_are_refused(busy: bool) -> None:
    wrong = Submit("wrong", tuple(PROMPTS[0]), SamplingParams(grammar=Grammar("regex", "a(")), 0)
    others = [Submit("plain", tuple(PROMPTS[0]), LONG, 0)] if busy else []
    link = play({0: others, 1: [wrong]})
    (refused,) = link.of(Refused)
    assert (refused.id, refused.kind) == ("wrong", "invalid")
    assert refused.message.startswith("regex: Regex parsing error at position 3")
