"""Short reviews, padded to a fixed length."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "truth": "collate pads each batch to 256 positions, of which a tenth are tokens; the model computes on all of them.",
    "cause": "padding",
    "also": [],
    "never": ["start-up", "data-loading", "evaluation", "small-operators"],
    "healthy": False,
}

PAD, MAX_LENGTH = 0, 256


class Reviews(Dataset):
    def __init__(self, n):
        g = torch.Generator().manual_seed(4)
        self.items = [torch.randint(1, 1000, (int(k),), generator=g) for k in torch.randint(8, 45, (n,), generator=g)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return {"input_ids": self.items[i], "label": i % 2}


def collate(items):
    ids = torch.full((len(items), MAX_LENGTH), PAD)
    mask = torch.zeros(len(items), MAX_LENGTH, dtype=torch.bool)
    for row, item in enumerate(items):
        ids[row, : len(item["input_ids"])] = item["input_ids"]
        mask[row, : len(item["input_ids"])] = True
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([i["label"] for i in items])}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 64, padding_idx=PAD)
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(64, 2)

    def forward(self, input_ids, attention_mask):
        h = self.encoder(self.embed(input_ids), src_key_padding_mask=~attention_mask)
        return self.classifier(h[:, 0])


def main():
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    for batch in DataLoader(Reviews(32 * 8), batch_size=8, shuffle=True, collate_fn=collate):
        logits = model(batch["input_ids"], batch["attention_mask"])
        loss = F.cross_entropy(logits, batch["labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(loss.item())


if __name__ == "__main__":
    main()
