"""Soft actor-critic with a simulator in a thread of its own that fills the buffer while the networks learn."""

import argparse
import copy
import threading
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CASE = {
    "generation": 5,
    "truth": "The acting thread holds the buffer's lock while it waits for its simulator, so that the learner waits for its batch.",
    "cause": "data-loading",
    "also": ["host-python"],
    "never": ["start-up", "evaluation", "growth", "periodic-pause", "small-operators", "logging"],
    "healthy": False,
    "place": [
        "with self.lock:",
        "self.buffer.sample(self.args.batch)",
        "batch = ",
        "with self.buffer.lock:",
        "self.simulator.step(",
        "index = self.rng.integers(",
    ],
    "share": 48,
    "remedy": "hold the lock only while a transition is stored, and let the simulator run outside it",
    "without": [
        [
            "            with self.buffer.lock:\n"
            "                reward, after = self.simulator.step(action)\n"
            "                self.buffer.store(state, action, reward, after)\n",
            "            reward, after = self.simulator.step(action)\n"
            "            with self.buffer.lock:\n"
            "                self.buffer.store(state, action, reward, after)\n",
        ]
    ],
}


class Simulator:
    """A client of a physics process, which needs 5 ms for a frame and repeats an action for some frames."""

    def __init__(self, n_state, frames=(2, 6), frame_time=0.005):
        self.state, self.frames, self.frame_time = np.zeros(n_state, np.float32), frames, frame_time
        self.rng = np.random.default_rng(2)

    def step(self, action):
        for _ in range(self.rng.integers(*self.frames, endpoint=True)):
            time.sleep(self.frame_time)
            self.state = np.tanh(0.95 * self.state + 0.1 * np.resize(action, self.state.shape)).astype(np.float32)
        return float(-np.square(self.state - 0.2).sum()), self.state


class Buffer:
    def __init__(self, size, n_state, n_action):
        self.rows = np.zeros((size, 2 * n_state + n_action + 1), np.float32)
        self.splits, self.at, self.filled = np.cumsum([n_state, n_action, 1]), 0, 0
        self.lock, self.rng = threading.Lock(), np.random.default_rng(0)

    def store(self, state, action, reward, after):
        self.rows[self.at] = np.concatenate([state, action, [reward], after])
        self.at, self.filled = (self.at + 1) % len(self.rows), min(self.filled + 1, len(self.rows))

    def sample(self, count):
        with self.lock:
            index = self.rng.integers(self.filled, size=count)
            rows = torch.from_numpy(self.rows[index])
        return torch.tensor_split(rows, torch.from_numpy(self.splits), dim=1)


class ActingThread(threading.Thread):
    def __init__(self, simulator, buffer, n_action):
        super().__init__(daemon=True)
        self.simulator, self.buffer, self.n_action, self.over = simulator, buffer, n_action, threading.Event()

    def run(self):
        rng = np.random.default_rng(1)
        while not self.over.is_set():
            state, action = self.simulator.state, rng.uniform(-1, 1, self.n_action).astype(np.float32)
            with self.buffer.lock:
                reward, after = self.simulator.step(action)
                self.buffer.store(state, action, reward, after)
            time.sleep(0.002)


def mlp(n_in, width, n_out):
    return nn.Sequential(nn.Linear(n_in, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, n_out))


class Learner:
    def __init__(self, args, buffer):
        self.args, self.buffer = args, buffer
        self.actor = mlp(args.states, args.width, 2 * args.actions)
        self.critics = nn.ModuleList(mlp(args.states + args.actions, args.width, 1) for _ in range(2))
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=3e-4, fused=True)
        self.critic_opt = torch.optim.Adam(self.critics.parameters(), lr=3e-4, fused=True)

    def act(self, state):
        mean, log_std = self.actor(state).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 1).exp())
        raw = normal.rsample()
        action = raw.tanh()
        return action, (normal.log_prob(raw) - torch.log(1 - action.square() + 1e-6)).sum(-1, keepdim=True)

    def learn(self):
        batch = self.buffer.sample(self.args.batch)
        state, action, reward, after = batch
        with torch.no_grad():
            following, log_prob = self.act(after)
            value = torch.min(*(q(torch.cat([after, following], 1)) for q in self.targets))
            target = reward + 0.98 * (value - 0.1 * log_prob)
        pair = torch.cat([state, action], 1)
        critic_loss = sum(F.mse_loss(q(pair), target) for q in self.critics)
        self.critic_opt.zero_grad()
        critic_loss.backward()
        self.critic_opt.step()

        self.critics.requires_grad_(False)
        mine, log_prob = self.act(state)
        actor_loss = (0.1 * log_prob - self.critics[0](torch.cat([state, mine], 1))).mean()
        self.actor_opt.zero_grad()
        actor_loss.backward()
        self.actor_opt.step()
        self.critics.requires_grad_(True)
        with torch.no_grad():
            torch._foreach_lerp_([*self.targets.parameters()], [*self.critics.parameters()], 0.005)
        return critic_loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=480)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--states", type=int, default=24)
    parser.add_argument("--actions", type=int, default=6)
    args = parser.parse_args()
    torch.manual_seed(0)
    buffer = Buffer(20_000, args.states, args.actions)
    for _ in range(2_000):
        buffer.store(
            *(np.random.randn(n).astype(np.float32) for n in (args.states, args.actions)), 0.0, np.zeros(args.states)
        )
    thread = ActingThread(Simulator(args.states), buffer, args.actions)
    thread.start()
    learner = Learner(args, buffer)
    for update in range(args.updates):
        loss = learner.learn()
        if update % 120 == 0:
            print(f"update {update}: critic {loss.item():.3f}, {buffer.filled} transitions")
    thread.over.set()
    thread.join()


if __name__ == "__main__":
    main()
