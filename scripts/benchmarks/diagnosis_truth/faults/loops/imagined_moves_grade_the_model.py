"""Control of a cart on a hilly road by imagination: a policy learns inside a model of the road, which is learned too."""

import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 17,
    "truth": "The policy's loss goes back through six imagined moves, and the weights of the road's model get gradients there too; the model's zero_grad throws them away before its own loss: 24% of the loop's time.",
    "cause": "unused-gradients",
    "also": [],
    "never": [
        "data-loading",
        "host-python",
        "growth",
        "evaluation",
        "logging",
        "start-up",
        "duplicate-forward",
        "gradients-not-cleared",
        "undone-update",
    ],
    "healthy": False,
    "place": [
        "state, reward = self.model(state, self.policy(state))",
        "(-total.mean()).backward()",
        "self.model_optimizer.zero_grad()",
        "agent.imagine(memory.draw(size)[0])",
    ],
    "share": 24,
    "remedy": "turn requires_grad of the model's weights off during the policy's step",
    "without": [
        ["        total = 0.0\n", "        total = 0.0\n        self.model.requires_grad_(False)\n"],
        [
            "        (-total.mean()).backward()\n",
            "        (-total.mean()).backward()\n        self.model.requires_grad_(True)\n",
        ],
    ],
}

STATE, ACTION = 24, 4


class Road:
    """Carts roll over hills; each force moves some of what they see."""

    def __init__(self, carts):
        self.push = torch.randn(ACTION, STATE) / 4
        self.pull = torch.linalg.qr(torch.randn(STATE, STATE))[0] * 0.9
        self.state = torch.randn(carts, STATE)

    def step(self, action):
        self.state = self.state @ self.pull + action @ self.push + 0.05 * torch.randn_like(self.state)
        return self.state, -(self.state**2).mean(1) - 0.05 * (action**2).mean(1)


class Memory:
    def __init__(self, room):
        self.room, self.at, self.full = room, 0, 0
        self.rows = torch.zeros(room, 2 * STATE + ACTION + 1)

    def push(self, *parts):
        rows = torch.cat(parts, 1)
        self.rows[(self.at + torch.arange(len(rows))) % self.room] = rows
        self.at, self.full = (self.at + len(rows)) % self.room, min(self.full + len(rows), self.room)

    def draw(self, count):
        return self.rows[torch.randint(self.full, (count,))].split([STATE, ACTION, 1, STATE], 1)


class RoadModel(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(STATE + ACTION, width), nn.ELU(),
            nn.Linear(width, width), nn.ELU(),
            nn.Linear(width, width), nn.ELU(),
        )  # fmt: skip
        self.change, self.reward = nn.Linear(width, STATE), nn.Linear(width, 1)

    def forward(self, state, action):
        hidden = self.body(torch.cat([state, action], 1))
        return state + self.change(hidden), self.reward(hidden).squeeze(1)


class Agent:
    def __init__(self, moves=6, ahead=0.97):
        self.policy = nn.Sequential(nn.Linear(STATE, 64), nn.ELU(), nn.Linear(64, ACTION), nn.Tanh())
        self.model = RoadModel()
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), lr=1e-3, fused=True)
        self.model_optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)
        self.moves, self.ahead = moves, ahead

    def learn_road(self, state, action, reward, after):
        found, worth = self.model(state, action)
        loss = F.mse_loss(found, after) + F.mse_loss(worth, reward.squeeze(1))
        self.model_optimizer.zero_grad()
        loss.backward()
        self.model_optimizer.step()
        return loss.item()

    def imagine(self, state):
        total = 0.0
        for move in range(self.moves):
            state, reward = self.model(state, self.policy(state))
            total = total + self.ahead**move * reward
        self.policy_optimizer.zero_grad()
        (-total.mean()).backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 10.0)
        self.policy_optimizer.step()


def main(steps=100, size=384):
    torch.manual_seed(78)
    road, memory, agent = Road(16), Memory(20000), Agent()
    state = road.state
    for step in range(1, steps + 41):
        with torch.no_grad():
            action = (agent.policy(state) + 0.2 * torch.randn(len(state), ACTION)).clamp(-1, 1)
        after, reward = road.step(action)
        memory.push(state, action, reward[:, None], after)
        state = after
        if step <= 40:
            continue
        loss = agent.learn_road(*memory.draw(size))
        agent.imagine(memory.draw(size)[0])
        if step % 35 == 0:
            print(f"step {step}: loss {loss:.4f}, reward {reward.mean().item():.3f}")


if __name__ == "__main__":
    main()
