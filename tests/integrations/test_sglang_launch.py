"""`dscale serve --engine sglang`: the command line, refusals, and the check of what came up, with a stand-in server."""

from __future__ import annotations

import json
import signal
import socket
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from dscale.cli.main import run as dscale
from dscale.config import InputError
from dscale.integrations.sglang.launch import Launch, plan, run

GIVEN = {"model": "M", "drafter": "D", "port": 9000}


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLICY", "SLOTS", "PREDICTOR", "CONFIG"):
        monkeypatch.delenv(f"DSCALE_{name}", raising=False)


def test_command_line_of_a_whole_setting() -> None:
    flags = GIVEN | {
        "predictor": "P", "slots": 6.0, "max_requests": 32, "api_key": ["secret-key"], "prefix_caching": False,
        "served_model_name": ["qwen"], "max_queue": 8,
    }  # fmt: skip
    made = plan(flags, 8, ["--mem-fraction-static", "0.8"])
    text = " ".join(made.command[1:])
    assert text.startswith("-m sglang.launch_server --model-path M --tp-size 8 --host 127.0.0.1 --port 9000")
    assert "--speculative-algorithm DSCALE --speculative-draft-model-path D" in text
    assert "--max-running-requests 32" in text
    assert "--max-queued-requests 8" in text
    assert text.endswith("--disable-radix-cache --mem-fraction-static 0.8")
    assert made.variables == {"DSCALE_PREDICTOR": "P", "DSCALE_POLICY": "dvl", "DSCALE_SLOTS": "6"}
    assert made.checked
    assert "secret-key" not in repr(made).replace("'--api-key', 'secret-key'", "")


def test_without_speculation_nothing_is_checked() -> None:
    made = plan({"model": "M", "policy": "off"}, 1, [])
    assert "DSCALE" not in " ".join(made.command)
    assert (made.variables, made.checked, made.url) == ({}, False, "http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"drafter": "D"}, "MODEL: missing"),
        ({"model": "M"}, "--drafter: missing"),
        (GIVEN | {"cors_origin": ["*"]}, "--cors-origin: not known with --engine sglang"),
        (GIVEN | {"policy": "auto"}, "policy: 'auto' does not run on SGLang"),
        (GIVEN | {"slots": 7.5, "policy": "confidence"}, "--slots: 7.5 must be a whole number"),
        (GIVEN | {"policy": "dvl"}, "needs a predictor"),
        (GIVEN | {"port": 0}, "--port: 0"),
        (GIVEN | {"api_key": ["aaaaaaaa", "bbbbbbbb"]}, "SGLang takes one of each"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(flags: dict, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        plan(flags, 1, [])
    assert "\n" not in str(caught.value)


def test_the_command_refuses_without_a_trace(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for line in ("M --engine vllm", "M --engine-arg x", "M -d D --engine sglang --policy dspark"):
        monkeypatch.setattr(sys, "argv", ["dscale", "serve", *line.split()])
        with pytest.raises(SystemExit) as ended:
            dscale()
        assert ended.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


def stand_in(folder: Path, state: dict) -> Launch:
    """A server that answers /server_info with `state` and ends with code 7 at SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = folder / "server.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import http.server, os, signal

            class Answers(http.server.BaseHTTPRequestHandler):
                def do_GET(self):
                    body = {json.dumps(state)!r}.encode()
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, *_):
                    pass

            signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
            http.server.HTTPServer(("127.0.0.1", {port}), Answers).serve_forever()
            """
        )
    )
    return Launch([sys.executable, str(script)], {}, f"http://127.0.0.1:{port}", checked=True)


@pytest.mark.parametrize(
    "state",
    [
        {"speculative_algorithm": "DFLASH", "internal_states": [{"dscale": {}}]},
        {"speculative_algorithm": "DSCALE", "internal_states": [{}]},
        {"speculative_algorithm": None},
    ],
)
def test_a_server_without_the_plugin_is_ended(tmp_path: Path, state: dict) -> None:
    said: list[str] = []
    assert run(stand_in(tmp_path, state), 60, said.append) == 1
    assert len(said) == 1
    assert "serves without DSCALE" in said[0]


def test_signals_go_on_to_the_server(tmp_path: Path) -> None:
    state = {"speculative_algorithm": "DSCALE", "internal_states": [{"dscale": {"version": "0"}}]}
    said: list[str] = []

    def later() -> None:
        time.sleep(2)
        signal.raise_signal(signal.SIGTERM)

    threading.Thread(target=later, daemon=True).start()
    assert run(stand_in(tmp_path, state), 60, said.append) == 0
    assert said == []


def test_the_servers_own_failure_is_the_exit_code(tmp_path: Path) -> None:
    launch = Launch([sys.executable, "-c", "raise SystemExit(5)"], {}, "http://127.0.0.1:9", checked=True)
    assert run(launch, 60) == 5
