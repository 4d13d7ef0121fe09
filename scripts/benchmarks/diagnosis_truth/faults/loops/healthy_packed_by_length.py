"""Languages of names, letter by letter: an LSTM over packed sequences, whose lengths come with the batch."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

CASE = {
    "generation": 13,
    "truth": "Sequences have different lengths, so batches are padded to their longest, but they are packed before the LSTM, which skips the padding; sorting and packing are little. The recurrence takes the time.",
    "cause": None,
    "also": ["small-operators"],
    "never": ["padding", "data-loading", "host-python", "growth", "recompilation", "evaluation"],
    "healthy": True,
}

LETTERS, LANGUAGES = 60, 8


def made_up_names(count):
    """Names whose letters follow each other by the habits of their language."""
    habit = torch.rand(LANGUAGES, LETTERS, LETTERS).pow(6)
    habit /= habit.sum(2, keepdim=True)
    language = torch.randint(LANGUAGES, (count,))
    letters = [torch.randint(LETTERS, (count,))]
    for _ in range(59):
        letters.append(torch.multinomial(habit[language, letters[-1]], 1).squeeze(1))
    names = torch.stack(letters, 1) + 1
    lengths = torch.randint(20, 61, (count,))
    return [(name[:n], label) for name, n, label in zip(names, lengths.tolist(), language.tolist(), strict=True)]


def collate_fn(batch):
    batch.sort(key=lambda pair: len(pair[0]), reverse=True)
    names, labels = zip(*batch, strict=True)
    return pad_sequence(names, batch_first=True), torch.tensor([len(n) for n in names]), torch.tensor(labels)


class NameClassifier(nn.Module):
    def __init__(self, hidden=160):
        super().__init__()
        self.embedding = nn.Embedding(LETTERS + 1, 64, padding_idx=0)
        self.lstm = nn.LSTM(64, hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.classifier = nn.Linear(hidden, LANGUAGES)

    def forward(self, names, lengths):
        packed = pack_padded_sequence(self.embedding(names), lengths, batch_first=True)
        _, (h_n, _) = self.lstm(packed)
        return self.classifier(h_n[-1])


def train(model, loader, optimizer, device):
    model.train()
    total, correct, seen = 0.0, 0, 0
    for names, lengths, labels in loader:
        names, labels = names.to(device), labels.to(device)
        optimizer.zero_grad()
        output = model(names, lengths)
        loss = nn.functional.cross_entropy(output, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        total += loss.item() * len(labels)
        correct += (output.argmax(1) == labels).sum().item()
        seen += len(labels)
    return total / seen, correct / seen


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(4)
    loader = DataLoader(made_up_names(2048), batch_size=64, shuffle=True, collate_fn=collate_fn)
    model = NameClassifier().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        loss, accuracy = train(model, loader, optimizer, device)
        print(f"Epoch: {epoch + 1:02} | Train Loss: {loss:.3f} | Train Acc: {accuracy * 100:.2f}%")


if __name__ == "__main__":
    main()
