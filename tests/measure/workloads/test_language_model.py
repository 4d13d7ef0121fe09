"""Language models of the user's own by their class alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cs_systems import run
from cs_systems.cli import main
from cs_systems.config import RunConfig, preset
from cs_systems.core.tables import first_row
from cs_systems.record import RunRecord, read_records

# The second argument of forward would take the targets for positions, if they were given by position.
SOURCE = """
from torch import nn


class LM(nn.Module):
    def __init__(self, vocab_size, context_length, d_model, num_layers, num_heads, d_ff, rope_theta, bias=False):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(d_model, d_ff, bias=bias), nn.SiLU(), nn.Linear(d_ff, d_model, bias=bias))
            for _ in range(num_layers)
        )
        self.head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, tokens, positions=None):
        assert positions is None
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Shallow(LM):
    def __init__(self, vocab_size, d_model):
        super().__init__(vocab_size, 1, d_model, 1, 1, d_model, 1.0)


class Other(LM):
    def __init__(self, vocab_size, hidden):
        super().__init__(vocab_size, 1, hidden, 1, 1, hidden, 1.0)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return file


def measured(source: Path, name: str, **options: Any) -> RunRecord:
    base = {"batch_size": 3, "seq_len": 8, "warmup": 0, "steps": 1, "device": "cpu"}
    return run(RunConfig(workload=f"{source}:{name}", **{**base, **options}), in_process=True)


def test_class_is_made_at_the_sizes_of_the_preset_and_trained_on_its_tokens(source: Path) -> None:
    model = preset("tiny")
    record = measured(source, "LM", model=model)
    ran = first_row(record.results, "ran")
    assert record.status == "ok", record.reason
    assert ran["tokens"] == 3 * 8
    assert ran["parameters"] == 2 * model.vocab_size * model.d_model + 2 * model.num_layers * model.d_model * model.d_ff


def test_argument_of_the_class_is_set_in_addition_to_the_sizes(source: Path) -> None:
    tiny = preset("tiny")
    plain, biased = (measured(source, "LM", model=tiny, workload_args=words) for words in ((), ("bias=true",)))
    more = first_row(biased.results, "ran")["parameters"] - first_row(plain.results, "ran")["parameters"]
    assert more == tiny.num_layers * (tiny.d_ff + tiny.d_model)


def test_size_without_an_argument_of_the_class_is_refused(source: Path) -> None:
    record = measured(source, "Shallow", model=preset("tiny", num_layers=3))
    assert record.status == "unavailable"
    assert "does not use num_layers" in (record.reason or "")


def test_class_with_another_argument_is_refused_with_the_form(source: Path) -> None:
    record = measured(source, "Other", model=preset("tiny"))
    assert "or a class of a language model, whose constructor takes sizes by the names d_model, d_ff" in (
        record.reason or ""
    )


def test_class_is_a_workload_of_the_command_line(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    options = ["--batch-size", "1", "--steps", "1", "--warmup", "0", "--device", "cpu", "--out", "run"]
    assert main(["time", "--workload", "mine.py:LM", "--size", "tiny", "--context-length", "4", "8", *options]) == 0
    records, _ = read_records(source.parent / "run")
    assert [first_row(record.results, "ran")["tokens"] for record in records] == [4, 8]
