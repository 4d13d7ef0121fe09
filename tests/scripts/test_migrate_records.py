"""Tests of migrating records of earlier schemas: missing fields, and model FLOPs that were credited differently."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from cs_systems.config import Mode, RunConfig
from cs_systems.core.validation import ConfigError
from cs_systems.record import RunRecord, append_record, read_records

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("migrate_records", ROOT / "scripts" / "migrate_records.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def earlier(version: int, workload: str = "train_step", **results: Any) -> dict[str, Any]:
    """Return a record as an earlier version wrote it: fields that came later are absent."""
    data: dict[str, Any] = json.loads(RunRecord("a", RunConfig().to_dict(), "ok").to_json())
    for name in ("allocator", "compile_scope", "strategy_args"):
        del data["config"][name]
    del data["origin"], data["predicted"]
    data["config"] |= {"workload": workload, "mode": "forward"}
    return data | {"schema_version": version, "results": results}


def test_missing_fields_have_their_defaults(script: Any, tmp_path: Path) -> None:
    file = tmp_path / "runs" / "records.jsonl"
    file.parent.mkdir()
    file.write_text(json.dumps(earlier(1)) + "\n")
    append_record(file, kept := RunRecord("b", RunConfig().to_dict(), "ok"))
    with pytest.raises(ConfigError, match="the record has schema 1"):
        read_records(file)
    assert script.main([str(tmp_path)]) == 0
    record, untouched = read_records(file)[0]
    assert (record.run_config, record.origin, record.predicted) == (RunConfig(mode=Mode.FORWARD), None, False)
    assert record.config.keys() == RunConfig().to_dict().keys()
    assert untouched == kept


@pytest.mark.parametrize("forward", [4 * 8 * 7 * 7, 15])  # 15: half of an odd number was rounded down
def test_backward_of_an_attention_call_is_credited_twice_its_forward(script: Any, forward: int) -> None:
    old = {"forward": forward, "backward": forward * 5 // 2}
    costs = [{"phase": phase, "model_flops": flops, "hardware_flops": 9 * forward} for phase, flops in old.items()]
    costs.append({"phase": "step", "model_flops": sum(old.values()), "hardware_flops": 18 * forward})
    costs.append({"phase": "input", "model_flops": None, "hardware_flops": None})
    record = RunRecord.from_dict(script.migrated(earlier(2, "attention", cost=costs)))
    flops = {row["phase"]: row["model_flops"] for row in record.results["cost"]}
    assert flops == {"forward": forward, "backward": 2 * forward, "step": 3 * forward, "input": None}
    assert [row["hardware_flops"] for row in record.results["cost"]] == [9 * forward, 9 * forward, 18 * forward, None]
    later = RunRecord.from_dict(script.migrated(earlier(3, "attention", cost=[dict(row) for row in costs[:1]])))
    assert later.results["cost"][0]["model_flops"] == forward


def test_attention_of_a_users_own_model_is_marked_as_counted_in_full(script: Any) -> None:
    modules = [{"path": "encoder.attn", "class": "MultiheadAttention"}]
    cost = [{"phase": "forward", "model_flops": 7}]
    (caveat,) = RunRecord.from_dict(script.migrated(earlier(2, "mine.py:build", cost=cost, modules=modules))).warnings
    assert caveat.code == "full-attention"
    assert caveat.message == "model FLOPs count the whole score matrix of attention: an earlier version counted it so"
    modules[0] = {"path": "conv1", "class": "Conv2d"}
    assert not script.migrated(earlier(2, "mine.py:build", cost=cost, modules=modules))["warnings"]


def test_migrated_records_and_rows_of_benchmarks_are_left_alone(
    script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "two_gpus.jsonl").write_text(json.dumps(earlier(2)) + "\n")
    (tmp_path / "rows.jsonl").write_text(row := '{"variant":  "alone"}\n')
    script.main([str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path / 'two_gpus.jsonl'}: 1 of 1 records\n"
    assert (tmp_path / "rows.jsonl").read_text() == row
    script.main([str(tmp_path)])
    assert capsys.readouterr().out == ""
