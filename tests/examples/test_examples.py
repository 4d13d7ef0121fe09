"""Each file of examples/ runs on a CPU as its docstring says, and prints a result."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
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


def _run(folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_example_runs_on_a_cpu(file: Path, tmp_path: Path) -> None:
    words = ["16"] if file.stem == "what_fits" else []
    printed = _run(tmp_path, str(file), *words)
    assert SAYS[file.stem] in printed
    assert "error" not in printed


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
def test_own_code_works_on_the_command_line(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = _run(tmp_path, "-m", "cs_systems", *words, "--steps", "3", "--warmup", "1", "--out", "run")
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
