"""What every HTTP request passes: a request id, the API key, limits on its body, a line in the log, and no traceback to
the client whatever happens inside."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dscale.serve.errors import ApiError
from dscale.serve.logs import log, tell
from dscale.serve.settings import ServerSettings

REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
OPEN = ("/health", "/ready", "/version", "/", "/openapi.json")  # answered without a key
OPEN_FOLDERS = ("/page/",)
QUIET = ("/health", "/ready", "/metrics")  # asked for all the time; logged only when they fail
DRAINED = 8  # times max_body that is read away, so that a client that sends too much still reads our answer
DRAIN_SECONDS = 5.0


class Gate:
    """The outermost layer around the routes."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self.app, self.settings = app, settings
        self._keys = [_digest(key.encode()) for key in settings.api_key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await Passage(self, scope, receive, send).run()
        else:
            await self.app(scope, receive, send)

    def client_of(self, scope: Scope) -> str:
        """Who is asking: the digest of an accepted key, else the address. ApiError 401 without an accepted key."""
        address = scope.get("client") or ("local", 0)
        if not self._keys:
            return str(address[0])
        given = _digest(_header(scope, b"authorization").removeprefix(b"Bearer ").strip())
        matches = [hmac.compare_digest(given, key) for key in self._keys]  # all, so that time tells nothing
        path = scope["path"]
        if not any(matches) and path not in OPEN and not path.startswith(OPEN_FOLDERS):
            raise ApiError(
                401, "API key missing or wrong; send it as Authorization: Bearer KEY", code="invalid_api_key"
            )
        return given.hex()[:16] if any(matches) else str(address[0])


class Passage:
    """One request through the gate. fields: what its line in the log says beyond the usual."""

    def __init__(self, gate: Gate, scope: Scope, receive: Receive, send: Send) -> None:
        self.gate, self.scope, self._receive, self._send = gate, scope, receive, send
        given = _header(scope, b"x-request-id")
        self.id = given.decode() if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        self.fields: dict[str, Any] = {}
        self.status = 0
        self._began = time.perf_counter()
        self._read = 0
        self._whole = False  # the body was read to its end

    async def run(self) -> None:
        """Let the request through, or answer why not."""
        state = self.scope.setdefault("state", {})
        try:
            state.update(log=self.fields, id=self.id, client=self.gate.client_of(self.scope))
            self._check_length()
            await self.gate.app(self.scope, self.receive, self.send)
        except ApiError as error:
            await self._refuse(error)
        except asyncio.CancelledError:
            self.fields["error"] = "cancelled"
            raise
        except Exception:
            log.exception("failed", extra={"fields": {"id": self.id, "path": self.scope["path"]}})
            await self._refuse(
                ApiError(500, f"the server failed; its log tells more under id {self.id}", code="internal")
            )
        finally:
            self._log()

    def _check_length(self) -> None:
        length = _header(self.scope, b"content-length")
        if length.isdigit() and int(length) > self.gate.settings.max_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self.gate.settings.max_body} bytes", code="body_too_large")

    async def receive(self) -> Message:
        """The body as it comes; ApiError when it is too large (413) or too slow (408)."""
        if self._whole:
            return await self._receive()
        left = self.gate.settings.body_timeout - (time.perf_counter() - self._began)
        try:
            message = await asyncio.wait_for(self._receive(), max(left, 0.01))
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", code="timeout") from None
        if message["type"] == "http.request":
            self._read += len(message.get("body", b""))
            self._whole = not message.get("more_body", False)
            if self._read > self.gate.settings.max_body:
                raise self._too_large()
        return message

    async def send(self, message: Message) -> None:
        """Pass on a part of the response, with the request's id in its headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [
                *message.get("headers", []),
                (b"x-request-id", self.id.encode()),
                (b"x-content-type-options", b"nosniff"),
            ]
        await self._send(message)

    async def _refuse(self, error: ApiError) -> None:
        if self.status:
            return  # a response is on its way; the server closes the connection where it breaks off
        self.fields["error"] = error.code
        if not self._whole:
            await self._drain()
        await error.response()(self.scope, self._receive, self.send)

    async def _drain(self) -> None:
        """Read away what the client still sends, within limits."""
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while self._read < DRAINED * self.gate.settings.max_body:
                    message = await self._receive()
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        return
                    self._read += len(message.get("body", b""))
        except TimeoutError:
            return

    def _log(self) -> None:
        path = self.scope["path"]
        if path in QUIET and self.status == 200:
            return
        tell(
            "request",
            logging.ERROR if self.status >= 500 and self.status != 503 else logging.INFO,
            id=self.id,
            method=self.scope["method"],
            path=path,
            status=self.status,
            seconds=round(time.perf_counter() - self._began, 4),
            **self.fields,
        )


def fields_of(request: Request) -> dict[str, Any]:
    """What the log will say about this request."""
    return request.state.log


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
