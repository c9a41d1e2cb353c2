"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}} under the right status."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse

from dscale.config import InputError
from dscale.serve.messages import EngineDied, Refusal

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
    504: "timeout_error",
}
UNIONS = {  # fields that take several types: what they may be, in one sentence
    "prompt": "must be text, a list of texts, a list of token ids or a list of such lists",
    "stop": "must be text or a list of texts",
    "content": "must be text or a list of text parts",
    "tool_choice": 'must be "none", "auto", "required" or an object naming a function',
    "guided_json": "must be a JSON schema (an object, or text)",
}
SHOWN = 200  # characters of a message about one field


class ApiError(HTTPException):
    """What a client is told. retry_after: seconds, for 429 and 503."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        headers = None if retry_after is None else {"Retry-After": str(max(math.ceil(retry_after), 1))}
        super().__init__(status, message, headers)
        self.message, self.param, self.code = clean(message), None if param is None else clean(param), code

    def body(self) -> dict[str, Any]:
        """The JSON object of the error."""
        kind = TYPES.get(self.status_code, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The response that carries it."""
        return JSONResponse(self.body(), self.status_code, headers=self.headers)


def clean(text: str) -> str:
    """The text with lone surrogates replaced, which JSON can bring in and UTF-8 cannot carry out."""
    return text.encode("utf-8", "replace").decode()


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """400: what was wrong with which field."""
    return ApiError(400, message, param, code)


def from_input(error: InputError, fields: Mapping[str, Any]) -> ApiError:
    """400 from an InputError, whose message begins with the name of the field where it is about one."""
    name = str(error).partition(":")[0]
    return invalid(str(error), name if name in fields else None)


def from_engine(error: Exception) -> ApiError:
    """What a Refusal or the engine's end means to the client."""
    if isinstance(error, EngineDied):
        return ApiError(500, "engine process ended; the request was lost, and the server is going down", code="engine")
    assert isinstance(error, Refusal)
    if error.kind == "invalid":
        return invalid(str(error))
    code = "shutting_down" if error.kind == "shutdown" else "overloaded"
    return ApiError(503, str(error), code=code, retry_after=5 if error.kind == "shutdown" else 1)


def from_validation(errors: Sequence[Any]) -> ApiError:
    """400 from pydantic's list of errors: one sentence about the first field that is wrong."""
    first = errors[0]
    place = [part for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return invalid(f"the body is not JSON ({first.get('ctx', {}).get('error', 'syntax error')})", code="bad_json")
    if not place and first["type"] == "value_error":
        return invalid(_sentence(first), first.get("ctx", {}).get("field"), "unknown_field")
    if not place:
        return invalid("the body must be a JSON object, sent as Content-Type: application/json", code="bad_json")
    union = next((index for index, part in enumerate(place) if part in UNIONS), None)
    if union is not None and first["type"] not in ("missing", "value_error"):
        path = place[: union + 1]
        message = UNIONS[str(place[union])]
    else:
        path = [part for part in place if not (isinstance(part, str) and ("[" in part or part in ("str", "int")))]
        message = _sentence(first)
    name = ".".join(str(part) for part in path)
    code = "missing" if first["type"] == "missing" else "invalid_type"
    return invalid(f"{name}: {message}"[: SHOWN * 2], name, code)


def _sentence(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "is required"
    text = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    given = error.get("input")
    shown = f" (given: {given!r})" if isinstance(given, bool | int | float | str) and len(repr(given)) < 60 else ""
    return text[:1].lower() + text[1:] + shown
