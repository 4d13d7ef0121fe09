"""Two experts on two ranks; the router sends seven of eight tokens to the second."""

import torch
import torch.distributed as dist
from torch import nn

CASE = {
    "truth": "Rank 1's expert gets seven eighths of all tokens, and rank 0 waits for its results.",
    "cause": "expert-imbalance",
    "also": ["straggler", "exposed-communication"],
    "never": ["start-up", "data-loading", "evaluation", "pipeline-bubble", "small-buckets"],
    "healthy": False,
    "ranks": 2,
}


def exchange(tensor, send, receive):
    out = tensor.new_empty(sum(receive), tensor.shape[1])
    dist.all_to_all_single(out, tensor.contiguous(), receive, send)
    return out


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, send, receive):
        ctx.splits = send, receive
        return exchange(tensor, send, receive)

    @staticmethod
    def backward(ctx, grad):
        send, receive = ctx.splits
        return exchange(grad, receive, send), None, None


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    expert = nn.Sequential(nn.Linear(128, 1024), nn.GELU(), nn.Linear(1024, 128))
    optimizer = torch.optim.Adam(expert.parameters())
    send = [64, 448]
    receive = [send[rank]] * 2
    for _ in range(32):
        x = torch.randn(512, 128)
        y = Exchange.apply(expert(Exchange.apply(x, send, receive)), receive, send)
        loss = (y - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
