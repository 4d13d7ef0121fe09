"""Tests of phases that a recorder finds in loops of every kind, with a clock that advances at each boundary."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from cs_systems import Recorder
from cs_systems.analysis.comparison.loop_findings import ITERATORS
from cs_systems.measure.recorder import hooks
from cs_systems.record import Measurement
from tests.measure.recorder.loops import CLEAN, Ticks, batches, loader, loss_of, net, train


def measured(recorder: Recorder) -> Measurement:
    (record,) = recorder.records
    assert (record.status, record.reason) == ("ok", None)
    assert record.measurement is not None
    return record.measurement


def phases(recorder: Recorder) -> dict[str, float]:
    """Return the phases of the last step with the number of clock readings in each."""
    return {name: time for name, time in measured(recorder).samples[-1].phases_s.items() if time}


def test_phases_of_a_plain_loop_are_found(tmp_path: Path) -> None:
    recorder, _ = train(tmp_path, clock=Ticks())
    assert measured(recorder).phase_names() == (
        *("input", "forward", "loss", "backward", "clip", "optimizer", "zero_grad", "other", "between"),
    )
    found = phases(recorder)
    assert {name: found[name] for name in ("input", "forward", "loss", "backward", "optimizer", "zero_grad")} == {
        **dict.fromkeys(("input", "forward", "loss", "backward", "optimizer", "zero_grad"), 1.0)
    }


def test_phases_add_up_to_the_step(tmp_path: Path) -> None:
    recorder, _ = train(tmp_path)
    for sample in measured(recorder).timed:
        assert sum(sample.phases_s.values()) == pytest.approx(sample.wall_s, abs=2e-4)
        assert sample.submit_s == sample.phases_s


def test_time_between_steps_is_input_without_a_data_loader(tmp_path: Path) -> None:
    model = net()
    with Recorder(model, out=tmp_path, **CLEAN) as recorder:
        for batch in batches(6):
            with recorder.step():
                loss_of(model, batch).backward()
    assert "input" in measured(recorder).phase_names()
    assert "between" not in measured(recorder).phase_names()


@pytest.mark.parametrize("workers", [0, 1])
def test_workers_of_a_data_loader_are_noted(workers: int, tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(torch.randn(24, 4), batch_size=4, num_workers=workers)  # type: ignore[arg-type]
    with Recorder(model, optimizer, out=tmp_path, warmup=1, steps=3, profile="none", device="cpu") as recorder:
        for batch in loader:
            with recorder.step():
                model(batch).sum().backward()
                optimizer.step()
    assert recorder._has_workers == bool(workers)


@pytest.mark.parametrize(
    ("options", "started"),
    [({"num_workers": 0}, 0), ({"num_workers": 1}, 2), ({"num_workers": 1, "persistent_workers": True}, 0)],
)
def test_steps_that_start_workers_again_are_counted(options: dict[str, Any], started: int, tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(torch.randn(8, 4), batch_size=4, **options)  # type: ignore[arg-type]
    with Recorder(model, optimizer, out=tmp_path, warmup=2, steps=4, profile="none", device="cpu") as recorder:
        for _ in range(6):
            for batch in loader:
                with recorder.step():
                    model(batch).sum().backward()
                    optimizer.step()
    (row,) = ITERATORS.of(recorder.records[0].results)
    assert (row["with_new"], row["started"]) == (2, started)


@pytest.mark.parametrize(
    ("options", "collated"),
    [
        ({"batch_size": 4}, 3),
        ({"batch_size": 4, "collate_fn": list}, 0),
        ({"batch_size": None}, 0),
        ({"batch_size": 4, "sampler": SubsetRandomSampler(range(40))}, 0),
    ],
)
def test_rows_in_memory_that_a_loader_puts_together_are_noted(
    options: dict[str, Any], collated: int, tmp_path: Path
) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.randn(48, 4)), **options)
    with Recorder(model, optimizer, out=tmp_path, warmup=1, steps=3, profile="none", device="cpu") as recorder:
        for batch in loader:
            with recorder.step():
                model(batch[0] if isinstance(batch[0], torch.Tensor) else batch[0][0]).sum().backward()
                optimizer.step()
    rows = ITERATORS.of(recorder.records[0].results)
    assert [row["collated"] for row in rows] == ([collated] if collated else [])


def test_time_after_forward_does_not_count_as_loss_without_backward(tmp_path: Path) -> None:
    model = net()
    with Recorder(model, out=tmp_path, **CLEAN) as recorder, torch.no_grad():
        for inputs, _ in batches(6):
            with recorder.step():
                model(inputs).sum()
    assert measured(recorder).phase_names() == ("input", "forward", "other")


def test_accumulated_gradients_are_one_step(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(model, optimizer, out=tmp_path, clock=Ticks(), **CLEAN) as recorder:
        for i, batch in enumerate(loader(20)):
            with recorder.step():
                loss_of(model, batch).backward()
                if i % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()
    assert len(measured(recorder).samples) == 4
    assert phases(recorder)["forward"] == phases(recorder)["input"] == 4.0
    assert phases(recorder)["optimizer"] == 1.0


def test_closure_of_an_optimizer_is_split_into_its_phases(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    with Recorder(model, optimizer, out=tmp_path, clock=Ticks(), **CLEAN) as recorder:
        for batch in batches(5):

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                loss.backward()
                return loss

            with recorder.step():
                optimizer.step(closure)
    found = phases(recorder)
    assert found["forward"] == found["backward"] == found["zero_grad"] == found["loss"] > 1.0
    assert found["optimizer"] > found["forward"]


def test_two_models_and_two_optimizers_are_one_step(tmp_path: Path) -> None:
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    ours, theirs = (torch.optim.Adam(m.parameters()) for m in (generator, critic))
    with Recorder([generator, critic], [ours, theirs], out=tmp_path, clock=Ticks(), **CLEAN) as recorder:
        for real, _ in batches(5):
            with recorder.step():
                theirs.zero_grad()
                fake = generator(torch.randn(3, 4))
                (critic(fake.detach()).mean() - critic(real).mean()).backward()
                theirs.step()
                ours.zero_grad()
                (-critic(generator(torch.randn(3, 4))).mean()).backward()
                ours.step()
    assert phases(recorder) | {"other": 0} == {
        "input": 1.0,
        "forward": 5.0,
        "loss": 2.0,  # between two forward passes, nothing shows that the loss is running
        "backward": 2.0,
        "optimizer": 2.0,
        "zero_grad": 2.0,
        "other": 0,
    }
    assert recorder.records[0].results["ran"][0]["models"] == "Linear + Linear"
    assert recorder.records[0].results["ran"][0]["optimizer"] == "Adam + Adam"


def test_scaler_counts_as_optimizer_also_where_it_skips_the_step(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    with Recorder(model, optimizer, out=tmp_path, **CLEAN) as recorder:
        for i, batch in enumerate(batches(5)):
            with recorder.step():
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model, batch) * (float("inf") if i == 2 else 1.0)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
    assert len(measured(recorder).samples) == 4
    assert min(measured(recorder).durations_s("optimizer")) > 0
    assert recorder.records[0].results["ran"][0]["precision"] == "bf16"


@pytest.mark.parametrize(("where", "precision"), [("forward", "bf16"), ("a layer", "fp32"), ("nowhere", "fp32")])
def test_precision_is_that_of_most_products_where_forward_enters_autocast(
    where: str, precision: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    cast = {"forward": model, "a layer": model[2]}.get(where)
    if cast is not None:
        cast.forward = torch.autocast("cpu", torch.bfloat16)(cast.forward)  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Recorder(model, optimizer, out=tmp_path, **CLEAN | {"warmup": 1}) as recorder:
        for _ in range(6):
            with recorder.step():
                optimizer.zero_grad()
                model(torch.ones(2, 4)).float().sum().backward()
                optimizer.step()
    assert recorder.records[0].results["ran"][0]["precision"] == precision


def test_named_phase_covers_what_is_found_inside(tmp_path: Path) -> None:
    model = net()
    with Recorder(model, out=tmp_path, clock=Ticks(), **CLEAN) as recorder:
        for batch in batches(5):
            with recorder.step():
                with recorder.phase("teacher"), torch.no_grad():
                    model(batch[0])
                loss_of(model, batch).backward()
    assert phases(recorder)["teacher"] == phases(recorder)["forward"] == 1.0
    assert measured(recorder).phase_names()[-3:] == ("backward", "teacher", "other")


def test_copies_and_synchronisation_are_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device `meta` stands for an accelerator: a copy to it is one, and reading from it raises after the boundary."""
    monkeypatch.setattr(hooks, "_runs_on_accelerator", lambda tracker: True)
    with Recorder(net(), out=tmp_path, clock=Ticks(), **CLEAN) as recorder:
        for inputs, labels in batches(5):
            with recorder.step():
                moved = inputs.to("meta", non_blocking=True)
                torch.empty(3, device="meta", dtype=torch.int64).copy_(labels)
                inputs.to(torch.float64)
                inputs.sum().item()
                for read in (lambda x: x.item(), float, lambda x: x.cpu(), lambda x: x.to("cpu")):
                    with contextlib.suppress(RuntimeError, NotImplementedError):
                        read(moved.sum())
    assert phases(recorder)["copy"] == 2.0
    assert phases(recorder)["host_sync"] == 4.0


def test_phases_in_another_thread_do_not_belong_to_the_loop(tmp_path: Path) -> None:
    import threading

    model, other = net(), net()
    with Recorder([model, other], out=tmp_path, clock=Ticks(), **CLEAN) as recorder:
        for batch in batches(5):
            with recorder.step():
                thread = threading.Thread(target=loss_of, args=(other, batch))
                thread.start()
                thread.join()
                loss_of(model, batch).backward()
    assert phases(recorder)["forward"] == 1.0


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_model_is_found_and_never_compiled_again(how: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = net()
    if how == "wrapped":
        called: nn.Module = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    else:
        called = model
        model.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    graphs = []
    with Recorder(called, optimizer, out=tmp_path, clock=Ticks(), **CLEAN) as recorder:
        for batch in batches(8):
            with recorder.step():
                optimizer.zero_grad()
                loss_of(called, batch).backward()
                optimizer.step()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert recorder.records[0].results["ran"][0]["compiled_graphs"] == graphs[-1]
    assert phases(recorder)["forward"] == 1.0
    assert "no-forward" not in [c.code for c in recorder.records[0].warnings]
    assert set(graphs) == {graphs[0]}
    assert recorder.done


def test_module_below_the_called_one_is_named_in_a_caveat(tmp_path: Path) -> None:
    model, other = net(), net()
    recorder, _ = train(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    assert "no-forward" not in [c.code for c in recorder.records[0].warnings]
    with Recorder(other, out=tmp_path / "other", **CLEAN) as recorder:
        for batch in batches(5):
            with recorder.step():
                loss_of(model, batch).backward()
    caveat = next(c for c in recorder.records[0].warnings if c.code == "no-forward")
    assert caveat.message == "the call of Sequential was not seen"
    assert caveat.remedy == "pass the module that the loop calls: the one that DDP or torch.compile returned"


@pytest.mark.parametrize(("calls", "is_told"), [(200, True), (2, False)])
def test_time_that_many_short_phases_take_to_be_found_is_told(calls: int, is_told: bool, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Recorder(model, out=tmp_path, **CLEAN) as recorder:
        for _ in range(6):
            with recorder.step():
                for _ in range(calls):
                    output = model(torch.ones(1, 2))
                output.sum().backward()
    (record,) = recorder.records
    found = [each for each in record.warnings if each.code == "observed"]
    assert len(found) == is_told
    for caveat in found:
        assert re.fullmatch(
            r"finding the phases takes up to [\d.]+ (ms|µs) of the step, which has 4\d\d of their boundaries",
            caveat.message,
        )
