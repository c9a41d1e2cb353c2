"""The tiny model folders of the command tests, for the server, and servers that are asked."""

from __future__ import annotations

import openai
import pytest

from dscale.engine.llm import LLM
from tests.cli.test_commands import folders
from tests.serve.inprocess import InProcess, Scripted, live, service_of, tiny_llm

__all__ = ["folders"]


@pytest.fixture(scope="module")
def engine():
    client = InProcess(tiny_llm())
    yield client
    client.stop()
    assert client.llm.engine.scheduler.pool.held == 0


@pytest.fixture(scope="module")
def url(engine):
    with live(service_of(engine)) as address:
        yield address


@pytest.fixture(scope="module")
def offline() -> LLM:
    return tiny_llm("off")


@pytest.fixture
def api(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def scripted():
    """Runs a live server on a Scripted client: (client, url, service)."""
    stack = []

    def start(client: Scripted, **settings):
        service = service_of(client, **settings)
        context = live(service)
        stack.append(context)
        return client, context.__enter__(), service

    yield start
    for context in stack:
        context.__exit__(None, None, None)
