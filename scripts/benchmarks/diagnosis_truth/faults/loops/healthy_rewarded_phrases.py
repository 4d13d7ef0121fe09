"""Short phrases that please a judge: a recurrent writer, trained by REINFORCE on what it samples itself."""

import torch
from torch import nn

CASE = {
    "generation": 16,
    "truth": "The recurrent cell is called word by word because each word is drawn from what the words before suggest, and the graph of these calls is the one that the loss needs; products take the time.",
    "cause": None,
    "also": [],
    "never": [
        "evaluation",
        "duplicate-forward",
        "small-operators",
        "host-python",
        "host-sync",
        "cut-gradients",
        "unused-gradients",
        "wrong-mode",
        "growth",
        "divergence",
    ],
    "healthy": True,
}

WORDS, LENGTH, WIDTH = 64, 10, 320


class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS + 1, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, count):
        """Return phrases, and the logarithms of the chances of all words at each place."""
        word, state = torch.full((count,), WORDS), torch.zeros(count, WIDTH)
        phrase, logs = [], []
        for _ in range(LENGTH):
            state = self.cell(self.words(word), state)
            logs.append(self.head(state).log_softmax(1))
            word = logs[-1].detach().exp().multinomial(1).squeeze(1)
            phrase.append(word)
        return torch.stack(phrase, 1), torch.stack(logs, 1)


def praise(phrases, liked):
    """Return for each word whether it follows well on the word before."""
    return liked[phrases[:, :-1], phrases[:, 1:]]


def main(steps=50, batch=160):
    torch.manual_seed(74)
    liked = (torch.rand(WORDS, WORDS) < 0.15).float()
    writer = Writer()
    optimizer = torch.optim.Adam(writer.parameters(), lr=1e-3, fused=True)
    usual = 0.0
    for step in range(1, steps + 1):
        phrases, logs = writer(batch)
        rewards = praise(phrases, liked)
        later = rewards.flip(1).cumsum(1).flip(1)
        better = later - later.mean(0)
        chosen = logs.gather(2, phrases[..., None]).squeeze(2)
        loss = -(chosen[:, 1:] * better).mean() + 0.01 * (logs.exp() * logs).sum(2).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(writer.parameters(), 1.0)
        optimizer.step()
        usual = 0.9 * usual + 0.1 * rewards.mean().item()
        if step % 10 == 0:
            print(f"step {step}: {usual:.3f} of the words please")


if __name__ == "__main__":
    main()
