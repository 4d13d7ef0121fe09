"""Small loops with one cause of lost time each: `causes.py KIND`; lines that a test names have a comment."""

import gc
import sys
import time

import torch
from torch import nn

kind = sys.argv[1]
torch.manual_seed(0)
torch.set_num_threads(1)
width = 512 if kind in ("leak", "sum") else 64
model = nn.Sequential(nn.Embedding(64, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 64))
optimizer = torch.optim.SGD(model.parameters(), 1e30 if kind == "nan" else 0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=0.99)
half = torch.autocast("cpu", torch.float16, enabled=kind == "scaler")


def augment(tokens):
    end = time.thread_time() + 0.012  # of work: the time in which it waits for a core does not end it
    while time.thread_time() < end:  # busy
        pass
    return tokens


def wait():
    time.sleep(0.006)  # pause


def evaluate():
    with torch.no_grad():
        for _ in range(150):
            model(batch())  # evaluation


def batch():
    return torch.randint(1, 64, (16, 64))


class History:
    def __init__(self):
        self.losses = []


total, history, seen, weights = 0.0, History(), [], torch.zeros(1 << 24)
kept = [[] for _ in range(200_000 if kind == "collect" else 0)]
for step in range(150 if kind == "busy" else 45):
    tokens = augment(batch()) if kind == "busy" else batch()
    if kind == "padding":
        for row in range(1, 16):
            tokens[row, 8 + row :] = 0
    optimizer.zero_grad()
    with half:
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    if kind == "scaler":
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward(retain_graph=kind in ("leak", "sum"))
        optimizer.step()
    if kind == "busy":
        wait()
    if kind == "leak":
        history.losses.append(loss)  # kept
    if kind == "sum":
        total = total + loss  # summed
    if kind == "evaluation" and step % 10 == 9:
        evaluate()
    if kind == "pause" and step % 5 == 4:
        time.sleep(0.15)  # pause of the loop
    if kind == "save" and step % 5 == 4:
        torch.save(weights, sys.argv[2])  # checkpoint
    if kind == "collect":
        gc.collect()  # collection
    if kind == "slower":
        seen += range(4000)
        sum(value * value for value in seen)  # grows
    if kind == "rollout":
        evaluate()
