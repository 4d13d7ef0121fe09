"""The Python code that the guides show runs as it is written."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from cs_systems.config import RunConfig
from cs_systems.measure.workloads._setup import TrainingSetup
from cs_systems.record import read_records

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def shown(page: str, holds: str) -> str:
    """Return the only block of Python on a page that holds a text."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (GUIDES / page).read_text(), re.M | re.S)
    (found,) = (block for block in blocks if holds in block)
    return found


def run(page: str, holds: str, **names: Any) -> dict[str, Any]:
    """Run a block with some names defined, and return all names that it leaves."""
    exec(compile(shown(page, holds), page, "exec"), names)
    return names


def test_factory_of_a_hugging_face_model_is_whole() -> None:
    pytest.importorskip("transformers")
    factory = run("own_model.md", "LlamaForCausalLM")["llama"]
    with torch.device("meta"):
        setup = TrainingSetup.of(factory(RunConfig(batch_size=2), None, layers=1))
        assert setup is not None
        assert setup.model(**setup.batch).loss.shape == ()


def test_notebook_measures_a_hugging_face_model() -> None:
    transformers = pytest.importorskip("transformers")
    small = transformers.BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    batch = {"input_ids": torch.randint(1000, (2, 8)), "labels": torch.randint(2, (2,))}
    made = run(
        "notebook.md",
        "cs_systems.run(\n    model",
        model=transformers.BertForSequenceClassification(small),
        batch=batch,
    )
    assert made["record"].status == "ok", made["record"].reason


def test_loop_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(8, 3)
    batch = SimpleNamespace(inputs=torch.randn(4, 8), labels=torch.randint(3, (4,)))
    optimizer = torch.optim.AdamW(model.parameters())
    run(
        "own_loop.md", "Recorder(model", model=model, optimizer=optimizer, loader=[batch] * 40,
        loss_of=nn.functional.cross_entropy,
    )  # fmt: skip
    records, _ = read_records(tmp_path / "runs" / "mine")
    assert [record.status for record in records] == ["ok", "ok"]
