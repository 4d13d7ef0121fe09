"""Loops with one known cause each: the first sentence of `cs-systems run` names it, with its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cs_systems.record import read_records
from tests import forks

SCRIPT = Path(__file__).with_name("causes.py")


def line(comment: str) -> str:
    """Return the place of a line of the script by its comment."""
    lines = SCRIPT.read_text().splitlines()
    (number,) = (n for n, text in enumerate(lines, 1) if text.endswith(f"  # {comment}"))
    return f"causes.py:{number}"


def first_sentence(tmp_path: Path, *words: str, options: tuple[str, ...] = ()) -> str:
    """Run the script recorded, and return the first lines of the report as one."""
    run = ("-m", "cs_systems", "run", *options, "--out", str(tmp_path / "out"), "--", str(SCRIPT))
    done = forks.python(*run, *words, environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    paragraph = done.stderr.strip().partition("\n\n")[0]
    return " ".join(paragraph.split())


CAUSES = {
    "busy": rf"(?=.*\d+% of the step waits for the next batch, which the main process prepares: augment\(\) at "
    rf"{line('busy')} \(\d+%\): prepare batches in the workers)(?=.*\d+% of the step is the script's own Python.* "
    rf"wait\(\) at {line('pause')}, time.sleep \(\d+%\))1. ",
    "evaluation": rf"1. \d+% of the loop is in every tenth step: evaluate\(\) at {line('evaluation')}, forward passes "
    "without gradients: evaluate less often",
    "pause": rf"1. \d+% of the loop is in every fifth step: {line('pause of the loop')}, time.sleep: remove the pause",
    # one that the disk takes at once does not count as slow, and then no period is left
    "save": rf"1. \d+% of the loop is in (every fifth step|\d slow steps): {line('checkpoint')}, torch.save: save less",
    "leak": rf"1. host memory grows by [\d.]+ MiB a step: .* tensors with their graphs are kept in history.losses at "
    rf"{line('kept')}: keep numbers",
    "sum": rf"1. host memory grows by [\d.]+ MiB a step: .* total keeps a running sum with the graph of each step at "
    rf"{line('summed')}: keep numbers",
    "scaler": r"1. the GradScaler skips all 20 optimizer steps \(scale 1.70e\+38 at first, .*\), so that the loop ",
    "nan": r"1. the loss is NaN after the timed steps",
    "collect": rf"1. \d+% of the loop is Python's garbage collector: .* \({line('collection')}\): leave out gc.collect",
    "rollout": rf"1. \d+% of the step is forward passes without gradients: evaluate\(\) at {line('evaluation')}",
    "slower": r"1. (a step takes .* longer with each step: .* after \d+ steps"
    r"(, most of it outside of the model( \((after the timed steps mostly )?.*\))?)?: find what each"
    r"|(the step's time outside of the model grows by|\d+% of the step is the script's own Python:) .*"
    rf"{line('grows')})",
}


@pytest.mark.parametrize("kind", CAUSES)
def test_first_sentence_names_the_cause_with_its_line(kind: str, tmp_path: Path) -> None:
    found = first_sentence(tmp_path, kind, str(tmp_path / "checkpoint.pt"))
    assert re.match(CAUSES[kind], found), found
    (record,) = read_records(tmp_path / "out")[0]
    noisy = [caveat for caveat in record.warnings if caveat.code == "unstable" and "steps vary" in caveat.message]
    assert not noisy or kind not in ("evaluation", "pause", "save") or "load average" in noisy[0].message


def test_padding_is_found_in_the_inputs(tmp_path: Path) -> None:
    found = first_sentence(tmp_path, "padding")
    assert re.search(r"\d\. 7\d% of each batch \(16 × 63\) is padding, by the filler at the ends of rows: put", found)


def test_stopped_script_says_that_its_own_python_was_not_sampled(tmp_path: Path) -> None:
    found = first_sentence(tmp_path, "busy", options=("--stop", "--steps", "2:8"))
    assert re.match(
        r"cannot be told: what runs in \d+% of the step outside the model's phases: the script was ended after its "
        "last recorded step, before its stack was sampled; use cs-systems run without --stop$",
        found,
    )


def test_loop_without_a_fault_has_no_cause(tmp_path: Path) -> None:
    found = first_sentence(tmp_path, "none")
    assert not found.startswith("1. ")
    assert "grows" not in found
