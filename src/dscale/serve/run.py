"""One server from start to exit: socket, engine, HTTP, signals.

Exit codes: 0 stopped by SIGTERM or SIGINT with all that ran finished; 1 the engine's process ended by itself. A first
signal refuses what is new and lets what runs finish for drain_seconds; a second one ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import uvicorn
from prometheus_client import CollectorRegistry

from dscale.config import InputError
from dscale.models.loader import open_target
from dscale.models.tokenizer import Tokenizer
from dscale.serve.app import build_app
from dscale.serve.client import Client
from dscale.serve.garbage import keep_out_of_collections
from dscale.serve.logs import tell
from dscale.serve.messages import EngineDied
from dscale.serve.metrics import Metrics
from dscale.serve.service import Service
from dscale.serve.settings import ServerSettings

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LAST_WORDS = 2.0  # seconds that open responses get to say that the engine ended, or that time is up
KEEP_ALIVE = 30  # seconds an idle connection is kept
WATCH_SECONDS = 1.0  # between looks at whether the engine still answers


class HttpServer(uvicorn.Server):
    """uvicorn without its own signals: its socket has to stay open while requests drain, to answer 503."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to Run."""
        yield


class Run:
    """A server that runs. code: how it will exit."""

    def __init__(self, service: Service, client: Client, sockets: list[socket.socket]) -> None:
        self.service, self.client, self.sockets = service, client, sockets
        self.code = 0
        self.stop_asked = asyncio.Event()
        self.hurry = asyncio.Event()
        config = uvicorn.Config(
            build_app(service), log_config=None, access_log=False, lifespan="off", server_header=False,
            timeout_keep_alive=KEEP_ALIVE, timeout_graceful_shutdown=int(LAST_WORDS),
        )  # fmt: skip
        self.http = HttpServer(config)

    def signalled(self) -> None:
        """A signal came."""
        (self.hurry if self.stop_asked.is_set() else self.stop_asked).set()

    async def serve(self) -> int:
        """Until a signal or the engine's end; the exit code."""
        serving = asyncio.create_task(self.http.serve(sockets=self.sockets))
        metrics = asyncio.create_task(self._observe())
        watching = asyncio.create_task(self._watch())
        try:
            await self._until_over(serving)
        finally:
            self.service.closing.set()
            self.http.should_exit = True
            await serving
            metrics.cancel()
            watching.cancel()
        return self.code

    async def _until_over(self, serving: asyncio.Task[None]) -> None:
        ended = asyncio.create_task(self.client.wait())
        asked = asyncio.create_task(self.stop_asked.wait())
        await asyncio.wait((ended, asked, serving), return_when=asyncio.FIRST_COMPLETED)
        if self.stop_asked.is_set():
            await self._drain()
        else:
            self.code = 1
            code = ended.result() if ended.done() else None
            tell("engine ended", logging.CRITICAL, exit_code=code, open=self.service.open)
            await self._open_ends(LAST_WORDS)

    async def _drain(self) -> None:
        """Let what runs finish, within drain_seconds; a second signal or the engine's end cuts it short."""
        seconds = self.service.settings.drain_seconds
        tell("draining", open=self.service.open, seconds=seconds)
        self.service.closing.set()
        stopping = asyncio.create_task(self.client.stop(seconds))
        hurry = asyncio.create_task(self.hurry.wait())
        await asyncio.wait((stopping, hurry), return_when=asyncio.FIRST_COMPLETED)
        if self.hurry.is_set():
            stopping.cancel()
            left = await self.client.stop(0.0)
        else:
            left = stopping.result()
        self.code = 1 if left else 0  # the engine may have died while it was to finish
        await self._open_ends(LAST_WORDS)

    async def _open_ends(self, seconds: float) -> None:
        """Wait until no request is open, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.service.open:
                    await asyncio.sleep(0.02)

    async def _observe(self) -> None:
        async for snapshot in self.client.snapshots():
            if self.service.metrics is not None:
                self.service.metrics.observe(snapshot)

    async def _watch(self) -> None:
        """Say so when the engine falls silent, and when it answers again."""
        stalled = False
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if (self.service.state == "stalled") != stalled:
                stalled = not stalled
                event, level = ("stalled", logging.CRITICAL) if stalled else ("answers again", logging.WARNING)
                tell(f"engine {event}", level, open=self.service.open, seconds=round(self.client.silence, 1))


async def run_server(settings: ServerSettings) -> int:
    """Serve until told to stop; the exit code. InputError for what cannot be served."""
    sock = bind(settings.host, settings.port)
    loop, me = asyncio.get_running_loop(), asyncio.current_task()
    assert me is not None
    for one in SIGNALS:
        loop.add_signal_handler(one, me.cancel)  # while loading there is nothing to finish
    tell("loading", **settings.shown())
    try:
        client, tokenizer = await _load(settings)
    except asyncio.CancelledError:
        tell("stopped while loading")
        return 0
    except EngineDied as error:
        tell("engine ended", logging.CRITICAL, reason=str(error))
        return 1
    metrics = Metrics(CollectorRegistry(), settings.names[0])
    run = Run(Service(client, tokenizer, settings, metrics), client, [sock])
    for one in SIGNALS:
        loop.add_signal_handler(one, run.signalled)
    sock.listen(2048)
    keep_out_of_collections()
    tell("serving", url=url_of(sock), **client.about)
    code = await run.serve()
    if code == 0:
        await client.stop(0.0)
    tell("stopped", exit_code=code)
    return code


async def _load(settings: ServerSettings) -> tuple[Client, Tokenizer]:
    reading = asyncio.create_task(asyncio.to_thread(lambda: open_target(settings.model).tokenizer()))
    try:
        client = await Client.start(settings.model, settings.max_queue, settings.refits, **settings.llm_options())
    except BaseException:
        reading.cancel()
        raise
    return client, await reading


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet; InputError when that cannot be had."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, number)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise InputError(f"host, port: cannot listen on {host}:{port} ({error.strerror or error})") from None
    return sock


def url_of(sock: socket.socket) -> str:
    """The address under which a browser finds the socket."""
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
