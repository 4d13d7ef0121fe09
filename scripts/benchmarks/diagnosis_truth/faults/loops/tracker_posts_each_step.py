"""An autoencoder that sends its metrics to a tracking server by HTTP, one request per step."""

import json
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from torch import nn

CASE = {
    "generation": 2,
    "truth": "Each step posts its metrics to a tracking server and waits 25 ms for the answer.",
    "cause": "logging",
    "also": ["host-python", "periodic-pause"],
    "never": ["start-up", "data-loading", "evaluation", "growth", "checkpoint-writing"],
    "healthy": False,
    "place": ["urllib.request.urlopen(", "tracker.log_metrics("],
    "share": 58,
    "remedy": "collect the metrics and send them every hundredth step, or from another thread",
    "without": [["        tracker.log_metrics(step", "        step < 0 and tracker.log_metrics(step"]],
}


class Backend(BaseHTTPRequestHandler):
    """The tracking server, which is far away in real life."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.025)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


class Tracker:
    def __init__(self, url, run):
        self.url, self.run = url, run

    def log_metrics(self, step, **metrics):
        body = json.dumps({"run": self.run, "step": step, "metrics": metrics}).encode()
        request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as response:
            response.read()


class AutoEncoder(nn.Module):
    def __init__(self, d=512):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d, 512), nn.ReLU(), nn.Linear(512, 32))
        self.decoder = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, d), nn.Sigmoid())

    def forward(self, x):
        return self.decoder(self.encoder(x))


def main():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Backend)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tracker = Tracker(f"http://127.0.0.1:{server.server_port}/api/metrics", "run-17")
    torch.manual_seed(0)
    data = torch.rand(4096, 512)
    model = AutoEncoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(50):
        batch = data[torch.randint(0, len(data), (256,))]
        loss = nn.functional.binary_cross_entropy(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tracker.log_metrics(step, loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
    server.shutdown()


if __name__ == "__main__":
    main()
