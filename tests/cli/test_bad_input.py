"""Invalid input exits with status 2 before any cell; a cell that this machine cannot run is recorded as unavailable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cs_systems.cli import main
from cs_systems.config import PRESETS, ConfigError, RunConfig
from cs_systems.core.units import counted
from cs_systems.measure.runtime.sweep import sweep
from cs_systems.record import RunRecord, read_records
from tests.forks import own_fork_server

TINY = RunConfig(model=PRESETS["tiny"], batch_size=1, device="cpu", warmup=0, steps=3)

MALFORMED = {
    "tmie": "unknown command 'tmie'; did you mean time? The names are time, attention, ",
    "time --size smal": "unknown size 'smal'; did you mean small? The names are tiny, small, medium, ",
    "time --attention sdpa_flsh": "unknown attention backend 'sdpa_flsh'; did you mean sdpa_flash",
    "time --attention nowhere.py:f": "file 'nowhere.py' (from 'nowhere.py:f') does not exist; correct the path",
    "time --workload no.where:f": "module 'no.where' (from 'no.where:f') was not found; correct its name, add the",
    "time --attention nowhere.py:": "before the colon, and one plain name after it; write path/to/file.py:name or ",
    "time --workload trainstep": "unknown workload 'trainstep'; did you mean train_step",
    "time --precision bf61": "unknown precision 'bf61'; did you mean bf16",
    "time --mode fwd": "unknown mode 'fwd'; did you mean forward? The names are forward, ",
    "time --mode backward": "mode backward requires workload attention; use mode forward-backward",
    "time --mode typo": "unknown mode 'typo'; choose among forward, forward-backward, train-step\n",
    "attention --mode typo": "unknown mode 'typo'; choose among forward, backward, forward-backward\n",
    "time --compile on": "unknown compile mode 'on'; did you mean default? The names are none, default, ",
    "time --compile False": "unknown compile mode 'False'; did you mean none? The names are ",
    "time --compile fast": "unknown compile mode 'fast'; choose among none, default, reduce-overhead, ",
    "time --optimizer sgd": "unknown optimizer 'sgd'; choose among adamw, adamw_foreach, ",
    "time --precision BF16": "unknown precision 'BF16'; did you mean bf16 or ",
    "time --size 7B": "unknown size '7B'; did you mean 2.7B? The names are tiny, ",
    "time --device gpu": "unknown device 'gpu'; use auto, cpu, cuda or cuda:N",
    "time --d-model 32": "--d-model 32 is not divisible by --num-heads 12 of the preset; choose --num-heads",
    "time --num-heads 5": "--d-model 768 is not divisible by --num-heads 5; choose --num-heads among 3, 4, 6",
    "time --d-model 36": "of the preset gives 3, but rotary embeddings need an even number; choose --num-heads",
    "time --batch-size 0": "--batch-size is 0; it must be at least 1",
    "time --context-length -5": "--context-length is -5; it must be at least 1",
    "time --num-layers 0": "--num-layers is 0; it must be at least 1",
    "time --steps 0": "--steps is 0; it must be at least 1",
    "time --rounds 0": "--rounds is 0; it must be at least 1",
    "time --rounds 4 --steps 3": "--steps is 3, less than --rounds 4; give at least one step for each round",
    "time --warmup -1": "--warmup is -1; it must not be negative",
    "time --repeats 0": "--repeats is 0; it must be a whole number of at least 1",
    "time --timeout-s 0": "--timeout-s is 0; it must be more than 0 s and at most a year",
    "time --timeout-s inf": "--timeout-s is inf; it must be more than 0 s and at most a year",
    "time --timeout-s inf --dry-run": "--timeout-s is inf; it must be more than 0 s and at most a year",
    "memory --timeout-s nan --dry-run": "--timeout-s is nan; it must be more than 0 s",
    "comm --repeats 0 --dry-run": "--repeats is 0; it must be a whole number of at least 1",
    "time --seed 9223372036854775808": "--seed is 9223372036854775808; it must be above -2^63 and below 2^63, because",
    "attention --heads 99999999999999999999": "--heads is 99999999999999999999; it must be above -2^63 and",
    "time --memory-limit 99999999TiB": "--memory-limit is 109951161678088372224",
    "comm --size 99999999TiB": "--size is 109951161678088372224",
    "time --memory-limit lots": "--memory-limit 'lots' is not a size in bytes; use a form such as 8GiB or 512B",
    "time --memory-limit 0.5": "--memory-limit '0.5' has no unit; use 0.5GiB, 0.5GB, or 0.5B for bytes",
    "time --memory-limit 8": "--memory-limit '8' has no unit; use 8GiB, 8GB, or 8B for bytes",
    "time --memory-limit 0B": "--memory-limit '0B' is less than 1 byte; use a form such as 8GiB or 512B",
    "time --workload json:dump5": "json has no 'dump5'; did you mean dump or dumps?",
    "time --attention json:dump5": "json has no 'dump5'; did you mean dump or dumps?",
    "time --workload json:dumps --inputs json:dump5": "json has no 'dump5'; did you mean dump or dumps?",
    "memory --fits": "--fits has no value; give one, or leave out --fits",
    "time --out --steps 3": "--out has no value; give one, or leave out --out",
    "time --warmup_s": "--warmup-s has no value; give one, or leave out --warmup-s",
    "memory --fits 8GiB --timeout-s 0": "--timeout-s is 0; it must be more than 0 s and at most a year",
    "memory --fits 8XB": "--fits '8XB' is not a size in bytes; use a form such as 8GiB or 512B",
    "memory --best-checkpoint --budget 8": "--budget '8' has no unit; use 8GiB, 8GB, or 8B for bytes",
    "time --workload own:f --parts fused_rmsnorm": (
        "--parts applies only to train_step and training_curve, and the workload is own:f; leave out --parts\n"
    ),
    "time --workload own:f --set width": "--set has 'width', which is not of the form name=value; write width=VALUE",
    "time --workload own:f --set a=1 a=2": "--set sets a twice; set it once",
    "comm --seed 3": "--seed has no effect on collectives without --shuffle; leave out --seed\n",
    "time --set a=1": (
        "--set applies only to a workload of your own, path.py:name, and the workload is train_step; leave out --set\n"
    ),
    "time --workload own:f --recipe fast": (
        "--recipe fast applies only to train_step and training_curve, and the workload is own:f; leave out --recipe\n"
    ),
    "time --size tiny --recipe fast --compile none": (
        "--recipe fast compiles each block, and --compile none forbids it; leave out --compile, or use --recipe eager\n"
    ),
    "attention --dtype fp8": "unknown dtype 'fp8'; did you mean fp32 or fp16? The names are bf16, fp16, fp32, tf32\n",
    "attention --precision bf16-pure": "unknown dtype 'bf16-pure'; did you mean bf16? The names are",
    "attention --d-head 0": "--d-head is 0; it must be at least 1",
    "attention --batch-size 0 --context-length 8": "--batch is 0; it must be at least 1",
    "parallel --strategy ddp": "unknown parallel strategy 'ddp'; did you mean ddp_bucketed or ddp_flat or ddp_naive? ",
    "parallel --strategy ddp_flat+zero1_flat": "because ddp_flat and zero1_flat both divide the batch",
    "parallel --strategy zero1": "zero1 alone does not average gradients over the ranks; use ddp_bucketed+zero1",
    "parallel --world-size 0": "--world-size is 0; it must be at least 1",
    "parallel --bucket-size-mb large --strategy ddp_bucketed": "--bucket-size-mb must be a number of MiB, got 'large'",
    "parallel --bucket-size-mb 0 --strategy ddp_bucketed": "--bucket-size-mb is 0.0; it must be above 0",
    "parallel --strategy torch_ddp:view": "--strategy has 'view', which is not of the form name=value; write view",
    "parallel --strategy ddp_bucketed:": "strategy 'ddp_bucketed:' ends with a colon; leave out the colon\n",
    "parallel --strategy single:comm_dtype=bf16": "gives options to single, which has none; write single\n",
    "parallel --strategy ddp_bucketed::a=1": "'ddp_bucketed::a=1' has two colons in a row; write one\n",
    "parallel --strategy mine.py:STRATEGY": "file 'mine.py' (from 'mine.py:STRATEGY') does not exist; correct the path",
    "parallel --strategy ddp_bucketed:zero1": "joins zero1 by a colon, which stands before an option; write "
    "ddp_bucketed+zero1",
    "parallel --strategy ddp_bucketed:bucket_size=1": "no option 'bucket_size'; did you mean bucket_size_mb",
    "parallel --strategy torch_ddp:view=true": "torch_ddp has no option 'view'; did you mean gradient_as_bucket_view?",
    "parallel --strategy ddp_bucketed:bucket_size_mb=1": "--strategy sets 'bucket_size_mb', which must be set "
    "separately; leave it out there, and use --bucket-size-mb=1",
    "parallel --strategy ddp_bucketed:last_bucket_mb=0": "last_bucket_mb is 0; it must be a number above 0",
    "parallel --strategy ddp_bucketed:last_bucket_mb=small": "last_bucket_mb is 'small'; it must be a number above 0",
    "parallel --strategy ddp_bucketed:comm_dtype=fp8": "unknown comm_dtype 'fp8'; did you mean fp16? The names are",
    "parallel --strategy ddp_overlap:send_thread=maybe": "send_thread is 'maybe'; it must be true or false",
    "parallel --strategy torch_fsdp2:reshard_after_forward=2": "reshard_after_forward is 2; it must be true or false",
    "parallel --strategy ddp_overlap:max_ctas=1.5": "max_ctas is 1.5; it must be a whole number of at least 1",
    "parallel --device cpu --strategy ddp_overlap:max_ctas=8": "max_ctas requires NCCL, which needs GPUs; leave",
    "parallel --with kineto": "unknown value of --with 'kineto'; choose among overlap, rank_memory",
    "parallel --figure streams.svg --with rank_memory": "--figure requires --with overlap; add overlap to --with",
    "parallel --strategy single --world-size 4": "--world-size has no effect on --strategy single, which",
    "parallel --strategy single --world-size 2": "--world-size has no effect on --strategy single, which",
    "parallel --strategy fsdp+tp --size tiny --world-size 3 --tp-degree 2": "--tp-degree 2 does not divide 3 ranks; ",
    "parallel --strategy tp --size tiny --world-size 3": "--num-heads 4 is not divisible by --world-size 3, over which",
    "time --workload own.py": "'own.py' names a file, but no object in it; write own.py:name",
    "time --attention own.py": "'own.py' names a file, but no object in it; write own.py:name",
    "profile --with kineto --rounds 2": "--rounds is 2, but a profile covers one round; leave out --rounds",
    "attention --dtype fp64": "'fp64'; did you mean fp16 or fp32? The names are bf16, fp16, fp32, tf32\n",
    "time --attention eff": "unknown attention backend 'eff'; did you mean sdpa_efficient? The names are ",
    "time --mode forward --checkpoint every:1": "--checkpoint has no effect in mode forward, which runs no backward",
    "time --keep-graph": "the other modes always keep the graph; leave out --keep-graph",
    "time --mode forward --optimizer adamw": "--optimizer requires mode train-step, got forward; leave out --optimizer",
    "attention --keep-graph --mode backward": "the other modes always keep the graph; leave out --keep-graph",
    "attention --align lower_right": "--align lower_right requires a causal mask; use --causal true, or",
    "analyze a.json b.json --top 3": "a comparison of two traces shows every row; leave out --top",
    "snapshot a.pickle b.pickle --size small": "--size names the tensors of one snapshot, and two were given",
    "report runs --figure-kind rate": "--figure-kind requires --figure; add --figure FILE",
    "comm --figure figure.txt": "cannot write a figure to 'figure.txt'; its name must end in .svg, .png or .pdf",
    "comm --output .": "cannot write .: Is a directory; name a file in it",
    "parallel --output /dev/null/tables.txt": "cannot write /dev/null/tables.txt: ",
    "precision --output .": "cannot write .: Is a directory",
    "precision --dtypes --output .": "cannot write .: Is a directory",
    "time --out /dev/null/runs": "cannot write to /dev/null/runs: Not a directory; choose another --out",
    "compare a b c": "unexpected argument 'c', because the command takes 2 paths; leave it out",
    "report a b --sort step": "unexpected argument 'b', because the command takes 1 path; leave it out",
    "time own.py:factory": "because the command takes only options; write --workload own.py:factory",
    "doctor now": "unexpected argument 'now', because the command takes only options; write the name",
    "time --size tiny --size small": "--size is given twice; write all its values after a single --size",
    "attention --batch 2 --batch-size 3": "--batch-size and --batch are the same option; write all its values",
    "attention --batch-size 1 --batch-size 2": "--batch-size is given twice; write all its values after a single",
    "parallel --strategy ddp_bucketed:comm=bf16": "has no option 'comm'; did you mean comm_dtype?",
    "time --size tiny --num-heads 64": "but rotary embeddings need an even number; choose --num-heads among 8, 16, 32",
    "memory --size tiny --fits 500MiB": "--fits 500MiB is no more than the 751 MiB of the CUDA context alone; give",
    "memory --best-checkpoint --budget 1MiB": "--budget 1MiB is no more than the 751 MiB of the CUDA context",
    "precision --dtypes --inputs own.py:batch": "--inputs can be used only with --workload; name your model by",
    "precision --accumulation --inputs own.py:batch": (
        "--inputs cannot be used with --accumulation; leave out --inputs\n"
    ),
    "precision --dtypes --model own.py:net --inputs own.py:batch": "write --workload own.py:net in place of --model",
    "precision --model own.py:net": "--model requires --dtypes; add --dtypes, or use --workload own.py:net for timings",
    "memory --workload own.py --fits 8GiB": "'own.py' names a file, but no object in it; write own.py:name",
    "parallel --workload own.py": "'own.py' names a file, but no object in it; write own.py:name",
    "precision --workload own.py:make --precision fp32": "--precision fp32 leaves nothing to compare, because",
    "precision --explain --device cpu": "--explain compares kernels of a GPU, and --device is cpu; leave out",
    "report nowhere": "nowhere does not exist; give the folder of a run, or its file records.jsonl",
}


@pytest.mark.parametrize(("line", "message"), MALFORMED.items(), ids=MALFORMED)
def test_malformed_input_exits_2_before_any_cell(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []  # without a folder no worker was started


@pytest.mark.parametrize(
    ("line", "message"),
    {
        "time --size": "no value; give one, or leave out the option",
        "time --size ,": "no value; give one, or leave out the option",
        "time --context-length abc": "--context-length: 'abc' is not a whole number; use one such as 8",
        "time --steps abc": "--steps: 'abc' is not a whole number; use one such as 8",
        "time --d-model 1.5": "--d-model: '1.5' is not a whole number; use one such as 8",
        "time --warmup-s abc": "--warmup-s: 'abc' is not a number; use one such as 0.5",
        "time --timeout-s abc": "--timeout-s: 'abc' is not a number; use one such as 0.5",
        "report runs --format xml": "unknown format 'xml'; choose among terminal, markdown, latex, typst,",
        "profile --with nsy": "unknown value of --with 'nsy'; did you mean nsys? The names are nsys, kineto, ncu",
        "ab --format xml a b": "choose among terminal, markdown, latex, typst, csv, json -",
        "time --out=": "--out: the path is empty; give a path, or leave the argument out",
        "analyze --table phases --output= a.json": "--output: the path is empty; give a path",
        "compare a b --phase": "no value; give one, or leave out the option",
    }.items(),
)
def test_option_without_valid_value_exits_2_before_any_cell(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(line.split())
    assert stopped.value.code == 2
    error = " ".join(capsys.readouterr().err.replace("│", " ").split())  # without the frame
    assert message in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["--size tiny,small --batch-size 1,2", "--size tiny small --batch-size 1 2"])
def test_values_are_separated_by_spaces_or_commas(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    plans = "none blocks:0,1"
    assert main(["memory", *line.split(), "--checkpoint", *plans.split(), "--fits", "80GiB"]) == 0
    output = capsys.readouterr().out
    assert output.count("tiny ctx 64") == output.count("small ctx 512") == 4
    assert output.count("blocks:0,1") == 4


def test_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="seq_len is 65, more than context_length 64 of the ModelConfig; lower seq_len, or give a ModelConfig",
    ):
        replace(TINY, seq_len=65)


IMPOSSIBLE = {
    "backend without a CPU kernel": (
        {"attention": "sdpa_cudnn", "precision": "bf16"},
        "sdpa_cudnn: torch has no CUDNN_ATTENTION kernel on the CPU; use sdpa_flash or sdpa_math",
    ),
    "bf16 in the Triton interpreter": (
        {"attention": "flash_triton", "precision": "bf16"},
        "flash_triton: Triton's interpreter computes wrong bfloat16 products; use float32 or float16",
    ),
    "d_head that the backend does not support": (
        {"attention": "flash_triton", "model": replace(PRESETS["tiny"], d_model=1032, num_heads=4)},
        "flash_triton: d_head 258 is not from 1 to 256; use naive or sdpa_math",
    ),
    "precision that the CPU does not support": (
        {"precision": "tf32"},
        "tf32 needs an NVIDIA GPU of compute capability 8.0",
    ),
    "GPU that does not exist": ({"device": "cuda:99"}, ""),
}


@pytest.fixture(scope="module")
def impossible(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    cells = [replace(TINY, **fields) for fields, _ in IMPOSSIBLE.values()]  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch, own_fork_server():
        patch.setenv("TRITON_INTERPRET", "1")
        records = list(sweep(cells, out=tmp_path_factory.mktemp("impossible")))
    return dict(zip(IMPOSSIBLE, records, strict=True))


@pytest.mark.parametrize("cause", IMPOSSIBLE)
def test_cell_that_this_machine_cannot_run_is_unavailable(impossible: dict[str, RunRecord], cause: str) -> None:
    record = impossible[cause]
    assert record.status == "unavailable"
    assert record.measurement is None
    assert IMPOSSIBLE[cause][1] in (record.reason or "")


def test_missing_gpu_is_reported_with_remedy(impossible: dict[str, RunRecord]) -> None:
    import torch

    reason = impossible["GPU that does not exist"].reason or ""
    if torch.cuda.is_available():
        seen = counted(torch.cuda.device_count(), "GPU")
        last = torch.cuda.device_count() - 1
        devices = f"cuda:0 to cuda:{last}" if last else "cuda:0"
        assert reason == f"cuda:99 does not exist, because torch sees {seen}; use {devices}"
    else:
        assert reason.startswith("no CUDA: ")
        assert reason.endswith("; see cs-systems doctor, or use device cpu where a CPU is enough")


def test_sweep_without_any_result_exits_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--size", "tiny", "--attention", "sdpa_cudnn", "--device", "cpu", "--steps", "3", "--out", str(tmp_path)]
    assert main(["time", *words]) == 3
    assert "unavailable" in capsys.readouterr().out
    assert [r.status for r in read_records(tmp_path)[0]] == ["unavailable"]


def test_exit_status_depends_on_requested_cells_only(tmp_path: Path) -> None:
    words = ["time", "--size", "tiny", "--context-length", "8", "--steps", "3", "--out", str(tmp_path)]
    works, fails = ["--attention", "naive"], ["--attention", "sdpa_cudnn", "--device", "cpu"]
    assert main([*words, *works]) == 0
    assert main([*words, *fails]) == 3, "only the older cell in the folder has a result"
    assert main([*words, *works]) == 0, "the requested result is already recorded"
    assert [r.status for r in read_records(tmp_path)[0]] == ["ok", "unavailable"]
