"""`dscale serve` as a process: what it prints, how it refuses, how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from dscale.cli.main import run
from tests.conftest import tiny_config
from tests.serve.inprocess import byte_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A tiny llama of bytes with a chat template, as a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("served") / "target"
    torch.manual_seed(0)
    config = tiny_config("llama").decoder
    hf = LlamaConfig(
        vocab_size=257, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, head_dim=config.head_dim, max_position_embeddings=2048,
        tie_word_embeddings=True, eos_token_id=256, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(hf).save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


class Served:
    """A running `dscale serve`."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        command = [sys.executable, "-m", "dscale", "serve", *map(str, arguments), "--port", "0", "--dtype", "float32"]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip
        self.rows: list[dict] = []
        self.other: list[str] = []
        self._served = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._served.wait(90), self.other
        self.url = next((row["url"] for row in self.rows if row["event"] == "serving"), "")

    def _read(self) -> None:
        for line in self.process.stderr:
            try:
                self.rows.append(json.loads(line))
            except ValueError:
                self.other.append(line)
            if self.rows and self.rows[-1]["event"] == "serving":
                self._served.set()
        self._served.set()

    def ended(self, seconds: float = 30) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def engine_pid(self) -> int:
        """Process id of the engine, the only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


def stream(url: str, tokens: int, started: threading.Barrier | None = None) -> tuple[int, list[dict]]:
    """Status and events of one streamed completion of so many tokens."""
    body = {"prompt": "go", "stream": True, "max_tokens": tokens, "ignore_eos": True, "logit_bias": {"256": -100}}
    events = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if started is not None:
                started.wait(30)
                started = None
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
        return response.status_code, events


@pytest.fixture
def dscale(monkeypatch, capsys):
    """One `dscale serve` call in this process: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dscale", "serve", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


def test_check_says_what_would_be_served(dscale, target):
    code, out, _ = dscale(target, "--check", "--port", 0)
    record = json.loads(out)
    assert code == 0
    assert (record["family"], record["context_length"], record["chat"], record["policy"]) == (
        "llama",
        2048,
        True,
        "off",
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("TARGET", "--policy", "dvl"), "needs a drafter"),
        (("nothing-here",), "no such file"),
        (("TARGET", "--max-model-len", 9999), "context length 2048"),
        (("TARGET", "--drafter", "TARGET", "--policy", "full"), "drafter"),
        (("TARGET", "--host", "256.0.0.1"), "cannot listen on 256.0.0.1"),
        (("TARGET", "--port", 99999), "port: 99999"),
        (("TARGET", "--api-key", "short"), "api_key"),
        (("TARGET", "--deterministic", "--tp", 2), "deterministic: not with tensor_parallel 2"),
        ((), "MODEL: missing"),
    ],
)
def test_check_says_what_would_not(dscale, target, arguments, message):
    code, out, err = dscale(*[target if one == "TARGET" else one for one in arguments], "--check")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_help_has_an_example(dscale):
    text = dscale("--help")[1]
    assert "Example: dscale serve smollm2-135m --port 8000" in text
    assert "--drain-seconds" in text


def test_streams_that_run_when_it_is_told_to_stop_all_finish(target):
    started = threading.Barrier(33)
    with Served(target, DSCALE_MAX_REQUESTS="32") as server, ThreadPoolExecutor(32) as pool:
        answers = [pool.submit(stream, server.url, 800, started) for _ in range(32)]
        started.wait(60)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "late"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert httpx.get(f"{server.url}/health").status_code == 503
        for answer in answers:
            status, events = answer.result(60)
            assert status == 200
            assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert server.ended() == 0
        assert server.rows[-1] == {**server.rows[-1], "event": "stopped", "exit_code": 0}
        assert server.other == []


def test_a_second_signal_aborts_what_runs(target):
    started = threading.Barrier(2)
    with Served(target, "--drain-seconds", 60) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, server.url, 2000, started)
        started.wait(30)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGINT)
        _, events = answer.result(20)
        assert events[-1]["error"]["code"] == "shutting_down"
        assert server.ended(10) == 0


def test_the_engines_end_is_told_within_five_seconds_and_ends_the_server_with_1(target):
    started = threading.Barrier(2)
    with Served(target) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, server.url, 2000, started)
        started.wait(30)
        began = time.monotonic()
        os.kill(server.engine_pid(), signal.SIGKILL)
        _, events = answer.result(10)
        assert events[-1]["error"] == {**events[-1]["error"], "code": "engine", "type": "server_error"}
        assert server.ended(10) == 1
        assert time.monotonic() - began < 5


def test_an_engine_that_hangs_makes_health_fail_until_it_answers_again(target):
    started = threading.Barrier(2)
    with Served(target, "--stall-seconds", 1) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(stream, server.url, 1500, started)
        started.wait(30)
        os.kill(server.engine_pid(), signal.SIGSTOP)
        health = [wait_for_health(server.url, 503).json()["status"]]
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stalled")
        time.sleep(1.5)  # the log looks once a second
        os.kill(server.engine_pid(), signal.SIGCONT)
        health.append(wait_for_health(server.url, 200).json()["status"])
        assert health == ["stalled", "ok"]
        assert answer.result(60)[1][-1]["choices"][0]["finish_reason"] == "length"
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == 0
    events = [row["event"] for row in server.rows]
    assert events.index("engine stalled") < events.index("engine answers again")
    assert server.other == []


def wait_for_health(url: str, status: int) -> httpx.Response:
    """What /health says once it has this status, which it must have within 20 seconds."""
    deadline = time.monotonic() + 20
    while (response := httpx.get(f"{url}/health")).status_code != status and time.monotonic() < deadline:
        time.sleep(0.05)
    assert response.status_code == status
    return response


def test_a_taken_port(dscale, target):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = dscale(target, "--port", port)
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in err


def test_a_signal_while_loading(target):
    command = [sys.executable, "-m", "dscale", "serve", str(target), "--port", "0"]
    loading = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert "loading" in loading.stderr.readline()
    loading.send_signal(signal.SIGTERM)
    assert loading.wait(20) == 0
    assert "Traceback" not in loading.stderr.read()
