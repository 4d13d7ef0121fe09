"""Lightning: training_step calls self.net, and validation over 50 batches follows every tenth step."""

import lightning
import torch
from torch import nn

CASE = {
    "truth": "Validation over all 50 batches after every tenth step takes most of the time; training_step has the forward.",
    "cause": "evaluation",
    "also": ["periodic-pause", "data-loading"],
    "never": ["start-up", "small-operators"],
    "healthy": False,
    "requires": ["lightning"],
}


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
data = torch.utils.data.TensorDataset(torch.randn(400, 64), torch.randint(10, (400,)))
loader = torch.utils.data.DataLoader(data, batch_size=8)
options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "val_check_interval": 10}
lightning.Trainer(max_epochs=1, accelerator="cpu", **options).fit(Module(), loader, loader)
