"""Readings of memory: bytes of a model's state where a user's optimizer keeps it."""

import torch

from cs_systems.instrument.memory_readings import state_bytes


class Around(torch.optim.Optimizer):
    """Optimizer around another one, without groups and state of its own."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.local = torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


def test_state_is_counted_where_an_optimizer_around_another_keeps_none() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = Around([*model.parameters()])
    model(torch.ones(2)).sum().backward()
    optimizer.local.step()
    found = state_bytes(model, [optimizer, optimizer.local])
    assert found == {"parameters_bytes": 16, "gradients_bytes": 16, "optimizer_state_bytes": 16}
