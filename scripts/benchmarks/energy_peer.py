"""Energy of the same training steps by this package and by Zeus, and whether they agree within 1%.

Method: a loop of matrix products of a Transformer's size trains under a `Recorder`, which measures its timed steps.
Zeus' monitor has a window around the same steps but the last, and so has the package's own meter; the device has
finished all work where the windows begin and end. Both read the counter of NVML, which moves every 20 to 100 ms.
Output: the joules per step and the mean power by each, and the largest difference, as a markdown table.
Needs a GPU and Zeus: `pip install zeus` (it is no dependency).

    python scripts/benchmarks/energy_peer.py --out profiles/energy_peer
"""

from __future__ import annotations

import argparse
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from cs_systems import Recorder
from cs_systems.formulas.energy import ENERGY, mean_w, step_j
from cs_systems.machine.device import Device
from cs_systems.machine.energy import Meter

WARMUP = 10
AGREED = 0.01


def model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).cuda().bfloat16()


def run(steps: int) -> list[tuple[str, float, float, float]]:
    """Return (by whom, window in s, joules per step, mean W) of the same steps."""
    from zeus.monitor import ZeusMonitor

    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    batch = torch.randn(16, 512, 1024, device="cuda", dtype=torch.bfloat16)
    monitor = ZeusMonitor(gpu_indices=[torch.cuda.current_device()])
    meter = Meter(Device(torch.device("cuda", torch.cuda.current_device())))
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(
            net, optimizer, out=folder, name="energy", warmup=WARMUP, steps=steps + 1, profile="none", stacks=False
        )
        with recorder:
            for number in range(WARMUP + steps + 1):
                if number == WARMUP + steps:  # before the last step, after which the Recorder writes its record
                    torch.cuda.synchronize()
                    (own,) = meter.end(steps)
                    theirs = monitor.end_window("steps")
                if number == WARMUP:
                    torch.cuda.synchronize()
                    monitor.begin_window("steps")
                    meter.begin()
                with recorder.step():
                    optimizer.zero_grad()
                    net(batch).float().square().mean().backward()
                    optimizer.step()
        (record,) = recorder.records
    (of_loop,) = ENERGY.of(record.results)
    rows = [("Zeus", theirs.time, theirs.total_energy / steps, theirs.total_energy / theirs.time)]
    for name, row in (("meter", own), ("Recorder", of_loop)):
        joules, power = step_j(row), mean_w(row)
        if joules is None or power is None:
            raise SystemExit(f"{name} has no energy: the window of {row['window_s']:.2f} s is too short; raise --steps")
        rows.append((name, row["window_s"], joules, power))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="folder of the table")
    args = parser.parse_args()
    lines = ["| run | by | window (s) | J per step | mean W | J, of Zeus |", "|---:|---|---:|---:|---:|---:|"]
    worst = 0.0
    for repeat in range(args.repeats):
        rows = run(args.steps)
        theirs = rows[0][2]
        for name, window_s, joules, power in rows:
            worst = max(worst, abs(joules / theirs - 1))
            lines.append(
                f"| {repeat + 1} | {name} | {window_s:.2f} | {joules:.4f} | {power:.1f} | {joules / theirs:.4f} |"
            )
        time.sleep(1)
    verdict = "agree" if worst <= AGREED else "do not agree"
    lines += [
        "",
        f"{torch.cuda.get_device_name()}, Zeus {version('zeus')}, {args.steps} steps a run: they {verdict} within "
        f"{AGREED:.0%}; the largest difference is {worst:.2%}.",
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines) + "\n"
    (args.out / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
