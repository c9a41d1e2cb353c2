"""An OpenAI-compatible server that answers with as many words as asked for, fails on demand, and counts like vLLM.

python tests/evaluate/stub_server.py --port 8000 [--fail-every N] [--die-after N] [--beyond N]
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Stub:
    """fail_every: each such request gets a 500; die_after: the process exits at that request; cut_every: the stream
    ends without usage; beyond: tokens counted on after the end; pause: seconds before the first token."""

    fail_every: int = 0
    die_after: int = 0
    cut_every: int = 0
    beyond: int = 0
    pause: float = 0.0
    asked: int = 0
    running: int = 0
    most_running: int = 0
    tokens: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    """The requests of one stub."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # the connection's end is the answer's

        def log_message(self, *_: Any) -> None:
            pass

        def _send(self, code: int, body: str, kind: str = "application/json") -> None:
            self.send_response(code)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(200, json.dumps({"data": [{"id": "stub"}]}))
            elif self.path == "/metrics":
                name = "vllm:generation_tokens_total"
                self._send(200, f'{name}{{engine="0"}} {stub.tokens}.0\nvllm:num_requests_running {stub.running}.0\n')
            else:
                self._send(200 if self.path == "/health" else 404, "{}")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with stub.lock:
                stub.asked += 1
                number = stub.asked
                stub.arrived.append(time.perf_counter())
                stub.bodies.append(body)
                stub.running += 1
                stub.most_running = max(stub.most_running, stub.running)
            try:
                self._answer(number, body)
            finally:
                with stub.lock:
                    stub.running -= 1

        def _answer(self, number: int, body: dict[str, Any]) -> None:
            if stub.die_after and number >= stub.die_after:
                os._exit(9)
            if stub.fail_every and number % stub.fail_every == 0:
                return self._send(500, json.dumps({"error": {"message": "out of\nluck"}}))
            self._send(200, self._event(delta={"role": "assistant", "content": ""}), "text/event-stream")
            time.sleep(stub.pause)
            tokens = body["max_tokens"] - 1
            for _ in range(tokens):
                self.wfile.write(self._event(delta={"content": "w1 "}).encode())
            if not (stub.cut_every and number % stub.cut_every == 0):
                usage = {"prompt_tokens": 7, "completion_tokens": tokens + 1 + stub.beyond}
                self.wfile.write(self._event(delta={}, finish_reason="stop").encode())
                self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
            stub.tokens += tokens + 1
            return None

        @staticmethod
        def _event(**choice: Any) -> str:
            return f"data: {json.dumps({'choices': [{'index': 0, **choice}], 'usage': None})}\n\n"

    return Handler


@contextmanager
def stub_server(**settings: Any) -> Iterator[tuple[str, Stub]]:
    """A stub in a thread: its address, and what it saw."""
    stub = Stub(**settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(stub))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", stub
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("port", "fail-every", "die-after", "cap"):
        parser.add_argument(f"--{name}", type=int, default=0)
    given = parser.parse_args()
    stub = Stub(fail_every=given.fail_every, die_after=given.die_after)
    ThreadingHTTPServer(("127.0.0.1", given.port), handler(stub)).serve_forever()


if __name__ == "__main__":
    main()
