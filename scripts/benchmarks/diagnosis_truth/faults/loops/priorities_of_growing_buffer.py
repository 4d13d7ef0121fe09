"""Deep Q-learning from a prioritised replay buffer, on a simulated chain of states."""

import random
from collections import namedtuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 4,
    "truth": "The sampling weights of all transitions are computed anew from a list that gets longer: steps become slower.",
    "cause": "growth",
    "also": ["host-python", "data-loading"],
    "never": ["start-up", "evaluation", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "place": [
        "weights = [",
        "total = sum(weights)",
        "probabilities = ",
        "np.random.choice(",
        "self.memory.sample(",
        "w / total for w in",
    ],
    "share": 25,
    "remedy": "keep the sums in a tree, or the priorities in one array that is updated in place",
    "without": [
        [
            "        weights = [t.priority**self.alpha for t in self.transitions]\n        total = sum(weights)\n        probabilities = [w / total for w in weights]\n        chosen = np.random.choice(len(self.transitions), size, p=probabilities)\n",
            "        chosen = np.random.randint(0, len(self.transitions), size)\n        probabilities = dict.fromkeys(chosen.tolist(), 1 / len(self.transitions))\n",
        ]
    ],
}

Transition = namedtuple("Transition", "state action reward next_state done priority")


class PrioritisedReplay:
    def __init__(self, capacity, alpha=0.6, beta=0.4):
        self.capacity, self.alpha, self.beta = capacity, alpha, beta
        self.transitions = []

    def push(self, *args):
        if len(self.transitions) >= self.capacity:
            self.transitions.pop(0)
        top = self.transitions[-1].priority if self.transitions else 1.0
        self.transitions.append(Transition(*args, max(1.0, top)))

    def sample(self, size):
        weights = [t.priority**self.alpha for t in self.transitions]
        total = sum(weights)
        probabilities = [w / total for w in weights]
        chosen = np.random.choice(len(self.transitions), size, p=probabilities)
        batch = [self.transitions[i] for i in chosen]
        correction = np.array([(len(self.transitions) * probabilities[i]) ** -self.beta for i in chosen])
        return chosen, batch, torch.tensor(correction / correction.max(), dtype=torch.float32)

    def update(self, chosen, errors):
        for i, e in zip(chosen, errors.tolist()):
            self.transitions[i] = self.transitions[i]._replace(priority=abs(e) + 1e-5)


class Chain:
    def __init__(self, n=24):
        self.n, self.at = n, 0

    def observe(self):
        state = np.zeros(self.n, dtype=np.float32)
        state[: self.at + 1] = 1.0
        return state

    def step(self, action):
        self.at = min(self.n - 1, self.at + 1) if action == 1 else max(0, self.at - 1)
        done = self.at == self.n - 1
        reward = 1.0 if done else 0.001 if self.at == 0 else 0.0
        if done:
            self.at = 0
        return self.observe(), reward, done


class QNetwork(nn.Module):
    def __init__(self, n, actions=2, hidden=128):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(n, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.value, self.advantage = nn.Linear(hidden, 1), nn.Linear(hidden, actions)

    def forward(self, x):
        h = self.body(x)
        a = self.advantage(h)
        return self.value(h) + a - a.mean(1, keepdim=True)


class Agent:
    def __init__(self, env, gamma=0.99, batch_size=64, n_envs=160):
        self.envs = [env() for _ in range(n_envs)]
        self.states = [e.observe() for e in self.envs]
        self.gamma, self.batch_size = gamma, batch_size
        n = self.envs[0].n
        self.online, self.target = QNetwork(n), QNetwork(n)
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.RMSprop(self.online.parameters(), lr=2.5e-4)
        self.memory = PrioritisedReplay(100_000)

    def act(self, epsilon):
        with torch.no_grad():
            greedy = self.online(torch.from_numpy(np.stack(self.states))).argmax(1).tolist()
        for i, (env, best) in enumerate(zip(self.envs, greedy)):
            action = random.randrange(2) if random.random() < epsilon else best
            state, reward, done = env.step(action)
            self.memory.push(self.states[i], action, reward, state, done)
            self.states[i] = state

    def learn(self):
        chosen, batch, correction = self.memory.sample(self.batch_size)
        batch = Transition(*zip(*batch))
        state = torch.from_numpy(np.stack(batch.state))
        following = torch.from_numpy(np.stack(batch.next_state))
        reward, done = torch.tensor(batch.reward), torch.tensor(batch.done, dtype=torch.float32)
        with torch.no_grad():
            best = self.online(following).argmax(1, keepdim=True)
            goal = reward + self.gamma * (1 - done) * self.target(following).gather(1, best).squeeze(1)
        q = self.online(state).gather(1, torch.tensor(batch.action)[:, None]).squeeze(1)
        errors = goal - q
        loss = (correction * F.smooth_l1_loss(q, goal, reduction="none")).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.memory.update(chosen, errors.detach())
        return loss.item()


def main(steps=140):
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    agent = Agent(Chain)
    for step in range(steps):
        agent.act(epsilon=max(0.1, 1 - step / 80))
        loss = agent.learn()
        if step % 40 == 0:
            agent.target.load_state_dict(agent.online.state_dict())
            print(f"step {step} loss {loss:.5f} buffer {len(agent.memory.transitions)}")


if __name__ == "__main__":
    main()
