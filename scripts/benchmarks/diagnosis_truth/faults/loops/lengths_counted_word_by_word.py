"""Intents of short questions to an assistant: a bidirectional GRU over packed sequences."""

import random

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

CASE = {
    "generation": 13,
    "truth": "The model counts the length of each sentence for pack_padded_sequence by a Python loop over the single numbers of the padded batch, each of them a tensor that is compared with zero.",
    "cause": "host-python",
    "also": ["small-operators", "host-sync"],
    "never": ["data-loading", "evaluation", "growth", "start-up", "logging", "periodic-pause"],
    "healthy": False,
    "place": ["sum(1 for w in row if w != 0)"],
    "share": 12,
    "remedy": "count with (x != 0).sum(1), or return the lengths with the batch",
    "without": [["[sum(1 for w in row if w != 0) for row in x]", "(x != 0).sum(1)"]],
}

PAD, VOCAB, INTENTS = 0, 800, 12


def question():
    intent = random.randrange(INTENTS)
    keys = range(1 + 20 * intent, 21 + 20 * intent)
    words = [random.randrange(1, VOCAB) for _ in range(random.randint(24, 32))]
    for _ in range(3):
        words[random.randrange(len(words))] = random.choice(keys)
    return torch.tensor(words), intent


class IntentClassifier(nn.Module):
    def __init__(self, embedding_dim=64, hidden_dim=96):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, embedding_dim, padding_idx=PAD)
        self.gru = nn.GRU(embedding_dim, hidden_dim, bidirectional=True, batch_first=True)
        self.attention = nn.Linear(2 * hidden_dim, 1)
        self.output = nn.Linear(2 * hidden_dim, INTENTS)

    def forward(self, x):
        lengths = torch.as_tensor([sum(1 for w in row if w != 0) for row in x])
        packed = pack_padded_sequence(self.embedding(x), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        scores = self.attention(states).masked_fill((x[:, : states.shape[1]] == PAD).unsqueeze(2), -1e9)
        return self.output((states * scores.softmax(1)).sum(1))


def batches(data, size):
    random.shuffle(data)
    for i in range(0, len(data), size):
        words, intents = zip(*data[i : i + size], strict=True)
        yield pad_sequence(words, batch_first=True, padding_value=PAD), torch.tensor(intents)


def train_epoch(model, data, optimizer, criterion):
    model.train()
    total_loss, correct = 0, 0
    for x, y in batches(data, 64):
        optimizer.zero_grad()
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        optimizer.step()
        total_loss += loss.item() * len(y)
        correct += (logits.argmax(1) == y).sum().item()
    return total_loss / len(data), correct / len(data)


def main():
    random.seed(5)
    torch.manual_seed(5)
    data = [question() for _ in range(1600)]
    model = IntentClassifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, 6):
        loss, accuracy = train_epoch(model, data, optimizer, criterion)
        print(f"Epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
