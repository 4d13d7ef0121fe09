"""Measure a training step of your own model, from a plain `nn.Module`.

    cs-systems time --workload examples/own_model.py:make --precision fp32 bf16 --batch-size 8
    cs-systems profile --with kineto --workload examples/own_model.py:make --batch-size 8

Shows a workload factory. It receives the `RunConfig` and the device, and returns (module, inputs, loss). The options
--precision, --mode, --optimizer and --batch-size then work as for the built-in model, and profilers see its modules.
"""

import torch
from torch import nn

import cs_systems
from cs_systems import RunConfig

CLASSES = 10


def make(config, device):
    """Return (module, inputs, loss) for one training step; the loss takes the module's output."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 32 * 32, CLASSES)
    )
    images = torch.randn(config.batch_size, 3, 32, 32)
    labels = torch.randint(CLASSES, (config.batch_size,), device=device.torch)
    return model, images, lambda logits: nn.functional.cross_entropy(logits.float(), labels)


def main() -> None:
    record = cs_systems.run(RunConfig(workload=f"{__file__}:make", batch_size=8, steps=5))
    print(record.frame()[["phase", "median_s"]])


if __name__ == "__main__":
    main()
