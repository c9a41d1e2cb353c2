"""Files of records: what is rounded and what is not, where lines break, and that a compressed one reads the same."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest

from dscale.config import InputError
from dscale.evaluate.bench_record import as_kept, read_record
from dscale.evaluate.certificate_record import read_certificates
from dscale.evaluate.record_file import laid_out, read_json, record_text, rounded, write_record
from dscale.evaluate.report.records import read_source
from tests.evaluate.test_bench_record import RECORD, RUN


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("ratio", 2.1545678912, 2.154568),
        ("bandwidth", 4247396660791.55, 4247397000000.0),
        ("tokens_per_s", 161809.48731, 161809.5),
        ("error", 1.23456789e-9, 1.234568e-9),
        ("tokens", 1234567890.0, 1234567890.0),  # a count that a server told as a float
        ("tokens", 123456789012345678901, 123456789012345678901),
        ("seed", 1234567, 1234567),
        ("window_s", 3103.366283122999988, 3103.366283),
        ("step_seconds", 12345.6789123456, 12345.678912),
        ("step_seconds", 0.00001234567891, 0.00001234568),  # the finer of the two
        ("rows", 0.00083810699, 0.000838),  # of requests
        ("exact", True, True),
        ("rate", None, None),
        ("text", "0.1234567891", "0.1234567891"),
    ],
)
def test_what_a_number_is_kept_as(name: str, value: Any, kept: Any) -> None:
    assert rounded({name: value}) == {name: kept}
    assert rounded({name: [value, [value]]}) == {name: [kept, [kept]]}  # a list's floats are of its field
    assert json.loads(record_text({name: value}, exact=True)) == {name: value}


def test_what_is_not_finite_stays() -> None:
    assert rounded({"a": math.inf}) == {"a": math.inf}
    assert math.isnan(rounded({"a": math.nan})["a"])


def test_rows_take_a_line_each_and_short_things_one() -> None:
    rows = [[f"gsm8k:{n}#0", 0.25, 114, None] for n in range(9)]
    text = record_text({"kind": "bench", "arms": [{"name": "a", "policy": None}], "rows": rows, "ids": [*range(200)]})
    assert text.splitlines() == [
        "{",
        ' "kind": "bench",',
        ' "arms": [{"name":"a","policy":null}],',
        ' "rows": [',
        *[f'  ["gsm8k:{n}#0",0.25,114,null]{"," * (n < 8)}' for n in range(9)],
        " ],",
        f' "ids": [{",".join(map(str, range(200)))}]',
        "}",
    ]
    assert laid_out({}) == "{}"
    assert record_text({"b": 1, "a": 2}, sort=True) == '{"a":2,"b":1}\n'


def test_a_compressed_record_reads_the_same_and_is_the_same_bytes_again(tmp_path: Path) -> None:
    plain, small = tmp_path / "bench.json", tmp_path / "bench.json.gz"
    for path in (plain, small):
        write_record(path, RECORD.as_json())
    assert gzip.decompress(small.read_bytes()) == plain.read_bytes()
    assert read_record(small) == read_record(plain) == RECORD
    assert read_source(small).content == read_source(plain).content
    plain.unlink()
    assert read_record(plain) == RECORD  # under its old name
    assert read_source(plain).name == "bench.json"
    with pytest.raises(InputError, match=r"other\.json: cannot read a record: .*No such file"):
        read_source(tmp_path / "other.json")
    before = small.read_bytes()
    write_record(small, RECORD.as_json())
    assert small.read_bytes() == before


@pytest.mark.parametrize("damage", [lambda data: data[:40], lambda data: b"{}", lambda data: data[:30] + b"x" * 20])
def test_a_damaged_compressed_record_is_one_line(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "bench.json.gz"
    write_record(path, RECORD.as_json())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(OSError, match=r"."):
        read_json(path)
    for read in (read_record, read_source):
        with pytest.raises(InputError, match=r"bench\.json\.gz: cannot read a .*record") as found:
            read(path)
        assert "\n" not in str(found.value)


def test_a_run_is_kept_to_the_microsecond_with_its_counts_whole() -> None:
    from dataclasses import replace

    row = replace(RUN.rows[0], sent_s=0.00083810699999, ended_s=33.142612614999999)
    counters = {"steps": 1234567, "step_seconds": 3.3662831229, "accepted_by_position": [1234567.0, 2.0]}
    kept = as_kept(replace(RUN, rows=(row,), window_s=2.00000049, client_busy=0.16477392801876992, counters=counters))
    assert (kept.rows[0].sent_s, kept.rows[0].ended_s) == (0.000838, 33.142613)
    assert (kept.window_s, kept.client_busy) == (2.0, 0.1647739)
    assert kept.counters == {"steps": 1234567, "step_seconds": 3.366283, "accepted_by_position": [1234567.0, 2.0]}
    assert as_kept(kept) == kept


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"n": 1' + b"0" * 5000 + b"}", b"", b"a\nb", b"\xe9"])
def test_what_is_no_json_is_one_line(tmp_path: Path, text: bytes) -> None:
    plain, small = tmp_path / "bench.json", tmp_path / "bench.json.gz"
    plain.write_bytes(text)
    small.write_bytes(gzip.compress(text))
    for path in (plain, small):
        for read in (read_record, read_certificates, read_source):
            with pytest.raises(InputError, match=rf"{path.name}: cannot read a .*record") as found:
                read(path)
            assert "\n" not in str(found.value)
