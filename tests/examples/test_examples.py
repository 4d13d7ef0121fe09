"""Each file of examples/ runs on a CPU as its docstring says, and prints a result."""

import ast
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cs_systems.cli import main
from cs_systems.model.attention.naive import attention

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "attention_ladder": "online ",
    "compare_two_runs": "times the baseline",
    "live_model": "weights unchanged: True",
    "memory_snapshot": "peak: 203.9 MiB",
    "own_attention": "own_attention.py:attend",
    "own_loop": "zero_grad",
    "own_model": "backward",
    "precision_table": "predicted peak",
    "read_a_trace": "100% of the kernel time belongs to a phase",
    "time_presets": "sdpa_flash",
    "two_ranks": "ddp_bucketed+zero1",
    "what_fits": "does not fit 16 GiB",
}


@pytest.fixture
def on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder, with 100 columns and no GPU. Nothing runs in a subprocess, which would import torch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example_runs_on_a_cpu(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(file), *(["16"] if file.stem == "what_fits" else [])])
    monkeypatch.syspath_prepend(file.parent)
    runpy.run_path(str(file), run_name="__main__")
    printed = capsys.readouterr().out
    assert SAYS[file.stem] in printed
    assert "error" not in printed


@pytest.mark.usefixtures("on_a_cpu")
def test_own_attention_shows_a_long_path_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / ("long" * 50) / "own_attention.py"
    file.parent.mkdir()
    file.write_text((ROOT / "examples" / file.name).read_text())
    runpy.run_path(str(file), run_name="__main__")
    assert f"{file}:attend" in capsys.readouterr().out


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_docstring_gives_the_command(file: Path) -> None:
    said = ast.get_docstring(ast.parse(file.read_text())) or ""
    assert f"examples/{file.name}" in said
    assert len(file.read_text().splitlines()) <= 60


def test_readme_lists_every_example() -> None:
    listed = (ROOT / "examples" / "README.md").read_text()
    assert [file.name for file in EXAMPLES if f"[{file.name}]({file.name})" not in listed] == []


@pytest.mark.parametrize(
    "words",
    [
        ["time", "--workload", "examples/own_model.py:make", "--precision", "fp32", "bf16", "--batch-size", "2"],
        ["attention", "--attention", "naive", "examples/own_attention.py:attend", "--dtype", "fp32", "--batch-size",
         "1", "--heads", "2", "--context-length", "32"],
    ],
    ids=["own_model", "own_attention"],
)  # fmt: skip
@pytest.mark.usefixtures("on_a_cpu")
def test_own_code_works_on_the_command_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("examples").symlink_to(ROOT / "examples")
    assert main([*words, "--steps", "3", "--warmup", "1", "--out", "run"]) == 0
    printed = capsys.readouterr().out
    assert "naive" in printed or "own_model.py:make" in printed


def test_own_attention_agrees_with_torch() -> None:
    import torch

    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from own_attention import attend
    finally:
        sys.path.pop(0)
    q, k, v = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attend(q, k, v, causal=True), expected)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"causal": True, "align": "lower_right", "scale": 0.5}])
@pytest.mark.parametrize("name", ["tiled", "online"])
def test_rungs_of_the_attention_ladder_agree_with_naive(name: str, options: dict[str, Any]) -> None:
    rung = runpy.run_path(str(ROOT / "examples" / "attention_ladder.py"))[name]
    q = torch.randn(2, 3, 100, 8, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, 2, 3, 150, 8, dtype=torch.float64)
    made, right = rung(q, k, v, **options), attention(q, k, v, **options)
    torch.testing.assert_close(made, right)
    torch.testing.assert_close(*(torch.autograd.grad(one.sum(), q)[0] for one in (made, right)))
