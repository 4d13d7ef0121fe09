"""Named entities in sentences, fine-tuned by a trainer of one's own after the example of a well-known library."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

CASE = {
    "generation": 13,
    "truth": "The loader of the validation after each epoch has no batch_size, so 400 sentences go through the model one by one, which takes half as long as the epoch.",
    "cause": "evaluation",
    "also": ["small-operators", "periodic-pause"],
    "never": ["growth", "logging", "start-up", "padding", "checkpoint-writing"],
    "healthy": False,
    "place": ["DataLoader(self.eval_dataset)", "def evaluate(", "self.evaluate()", "self.model(**inputs)"],
    "share": 25,
    "remedy": "give the validation loader a batch size, such as that of the training",
    "without": [["DataLoader(self.eval_dataset)", "DataLoader(self.eval_dataset, batch_size=100)"]],
}


@dataclass
class TrainingArguments:
    num_train_epochs: int = 6
    per_device_train_batch_size: int = 16
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0


class Sentences(Dataset):
    def __init__(self, count, seed, length=24, vocabulary=300):
        generator = torch.Generator().manual_seed(seed)
        self.input_ids = torch.randint(vocabulary, (count, length), generator=generator)
        before = self.input_ids.roll(1, 1)
        self.labels = torch.where(before < 20, 1, 0) + torch.where(self.input_ids > 280, 2, 0)

    def __len__(self):
        return len(self.input_ids)

    def __getitem__(self, i):
        return {"input_ids": self.input_ids[i], "labels": self.labels[i]}


class TokenClassifier(nn.Module):
    def __init__(self, vocabulary=300, hidden=96, layers=3, labels=4):
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, hidden)
        self.position = nn.Parameter(torch.zeros(24, hidden))
        layer = nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classifier = nn.Linear(hidden, labels)

    def forward(self, input_ids, labels):
        logits = self.classifier(self.encoder(self.embeddings(input_ids) + self.position))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Trainer:
    def __init__(self, model, args, train_dataset, eval_dataset):
        self.model, self.args = model, args
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=self.args.per_device_train_batch_size, shuffle=True)

    def get_eval_dataloader(self):
        return DataLoader(self.eval_dataset)

    def training_step(self, inputs):
        self.model.train()
        loss, _ = self.model(**inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        loss, right, total = torch.tensor(0.0), 0, 0
        for inputs in self.get_eval_dataloader():
            batch_loss, logits = self.model(**inputs)
            loss += batch_loss * len(logits)
            right += (logits.argmax(-1) == inputs["labels"]).sum()
            total += inputs["labels"].numel()
        return {"eval_loss": loss.item() / len(self.eval_dataset), "eval_accuracy": int(right) / total}

    def train(self):
        loader = self.get_train_dataloader()
        for epoch in range(self.args.num_train_epochs):
            losses = torch.stack([self.training_step(inputs) for inputs in loader])
            print({"epoch": epoch + 1, "loss": round(losses.mean().item(), 4), **self.evaluate()})


if __name__ == "__main__":
    torch.manual_seed(42)
    trainer = Trainer(TokenClassifier(), TrainingArguments(), Sentences(480, 0), Sentences(400, 1))
    trainer.train()
