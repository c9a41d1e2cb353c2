"""schemathesis against our own OpenAPI document: whatever it thinks of, the server does not fail."""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, settings

from dscale.serve.app import build_app
from tests.serve.inprocess import Scripted, service_of

ROUTES = (
    r"^/(v1/(chat/completions|completions|models)|tokenize|detokenize|health|ready|"
    r"version|metrics|dscale/(about|policy))"
)
schema = schemathesis.openapi.from_asgi("/openapi.json", build_app(service_of(Scripted(["a", "b"]))))


@schema.include(path_regex=ROUTES).parametrize()
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_makes_the_server_fail(case):
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_the_document_names_every_public_route():
    paths = set(schema.raw_schema["paths"])
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health", "/dscale/live"} <= paths
    assert "422" not in schema.raw_schema["paths"]["/v1/completions"]["post"]["responses"]
