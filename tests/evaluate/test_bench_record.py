"""The benchmark's record: what is read is what was written, and what is no record is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dscale.config import InputError
from dscale.evaluate.bench import limited_by_client
from dscale.evaluate.bench_record import ArmInfo, BenchRecord, RequestRow, Run, read_record, record_of

ROW = RequestRow("r0", "p0", "gsm8k", 0.0, 0.25, 2.0, 10, 30, steps=10, accepted=20, verified=80, drafted=150)
RUN = Run("auto", 4, 0, 0, 0, 2.5, (ROW, replace(ROW, id="r1", output_tokens=20, first_token_s=None)))
RECORD = BenchRecord({"dscale": "0"}, {}, "dscale bench", 0, {"sha256": "0"}, (ArmInfo("auto", "dscale"),), (RUN,))


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps(RECORD.as_json()))
    assert read_record(tmp_path / "record.json") == RECORD


def test_a_record_without_the_clients_share_is_read_and_a_busy_client_is_told_of() -> None:
    content = RECORD.as_json()
    del content["runs"][0]["client_busy"]  # as records were before it was kept
    assert record_of(content) == RECORD
    assert limited_by_client(RUN) is None
    assert limited_by_client(replace(RUN, client_busy=0.8)) is None
    told = limited_by_client(replace(RUN, client_busy=0.93))
    assert told is not None
    assert told.startswith("auto, boot 0, c = 4, run 0: the client used 0.93 of a core")


def test_throughput_is_tokens_over_the_window_and_none_after_a_failure() -> None:
    assert RUN.tokens_per_s == 50 / 2.5
    failed = replace(RUN, rows=(ROW, replace(ROW, id="r1", error="503")))
    with pytest.raises(InputError, match="1 requests failed"):
        _ = failed.tokens_per_s


@pytest.mark.parametrize(
    ("change", "message"),
    [({"kind": "tune"}, "no record"), ({"schema": 2}, "schema 2"), ({"runs": [{}]}, "damaged")],
)
def test_another_file_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    (tmp_path / "record.json").write_text(json.dumps(RECORD.as_json() | change))
    with pytest.raises(InputError, match=message):
        read_record(tmp_path / "record.json")
