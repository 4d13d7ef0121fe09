"""Options that a command does not have: one message, with the option that was meant."""

from __future__ import annotations

import importlib

import pytest

from cs_systems.cli import COMMANDS, main
from cs_systems.cli._options import described
from cs_systems.cli._unknown_options import likely

OPTIONS = {
    command: [
        name
        for option in described(importlib.import_module(f"cs_systems.cli.{command}").ARGS)
        if not option.is_positional
        for name in option.names
    ]
    for command in COMMANDS
}


def misspelt(name: str) -> set[str]:
    """Return an option without one letter, with a doubled one, two exchanged, a word in front, and an underscore."""
    middle = len(name) // 2
    return {
        name[:middle] + name[middle + 1 :],
        name[:middle] + name[middle] + name[middle:],
        name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :],
        f"my-{name}",
        name.upper(),
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_misspelt_option_leads_to_the_option(command: str) -> None:
    known = OPTIONS[command]
    for name in known:
        for typed in misspelt(name) - {*known} if len(name) > 4 else ():
            assert name in likely(typed, known), f"--{typed}"


@pytest.mark.parametrize(
    ("line", "message"),
    {
        "attention --seq-len 64": "unknown option --seq-len; write --context-length",
        "attention --seqlen=64": "unknown option --seqlen; write --seq",
        "attention --max_seq_len 64": "unknown option --max_seq_len; write --seq or --context-length",
        "attention --head-dim 64": "unknown option --head-dim; write --d-head",
        "attention --num-heads 4": "unknown option --num-heads; write --heads",
        "attention --kv-heads 4": "unknown option --kv-heads; write --heads-kv",
        "time --seq-len 64": "unknown option --seq-len; write --context-length",
        "time --ctx 64": "unknown option --ctx; write --context-length",
        "time --context=5": "unknown option --context; write --context-length",
        "time --dtype bf16": "unknown option --dtype; write --precision",
        "time --model small": "unknown option --model; write --size",
        "time --batch 2": "unknown option --batch; write --batch-size",
        "time --n-layers 2": "unknown option --n-layers; write --num-layers",
        "time --iters 2": "unknown option --iters; write --steps",
        "time --output-dir runs": "unknown option --output-dir; write --out",
        "time --optimiser adamw": "unknown option --optimiser; write --optimizer",
        "time --atention naive": "unknown option --atention; write --attention",
        "time --attn naive": "unknown option --attn; write --attention",
        "time --learning-rate 3": "unknown option --learning-rate; see cs-systems time --help",
        "time --seq-\x1b[31m 3": r"unknown option --seq-\x1b[31m; see cs-systems time --help",
        "precision --dtype bf16": "unknown option --dtype; write --dtypes or --precision",
        "parallel --gpus 2": "unknown option --gpus; write --world-size",
        "memory --fit 24GiB": "unknown option --fit; write --fits",
        "comm --message-size 3": "unknown option --message-size; see cs-systems comm --help",
        "profile --kinetto": "unknown option --kinetto; see cs-systems profile --help",
        "profile --with nsys --nsys-arg --stats=true": (
            "unknown option --stats; write --nsys-arg=--stats=true if it is the value of --nsys-arg"
        ),
        "analyze a.json --tbl phases": "unknown option --tbl; write --table",
        "run --gpu -- train.py": (
            "unknown option --gpu; leave it out, or, if --gpu is an option of the script, write it after -- and the "
            "script's name"
        ),
    }.items(),
)
def test_unknown_option_is_refused_in_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split(" ")) == 2
    assert capsys.readouterr().err == f"cs-systems: {message}\n"
