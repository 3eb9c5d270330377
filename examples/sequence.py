"""One sequence shared by several processes, in a plain loop: the gradients are those of one process.

torchrun --nproc-per-node 2 examples/sequence.py --steps 10
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

import adjoint


def make_model() -> adjoint.Stack:
    torch.manual_seed(0)  # every process begins with the same weights
    return adjoint.Stack(adjoint.StackConfig(vocab_size=256, d_model=128, n_layer=4, mixer="mamba2"))


def gradient(model: adjoint.Stack) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def train(steps: int, seqlen: int) -> None:
    dist.init_process_group("gloo")  # with GPUs "nccl"; torchrun has set what it reads
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    text = torch.tensor(list(Path(os.__file__).read_bytes()))  # Python's own library, a byte a token
    model, method = make_model(), adjoint.Exact(chunk_size=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)  # every process has the same rows
    for step in range(1, steps + 1):
        start = int(torch.randint(len(text) - seqlen, (), generator=generator))
        ids = text[None, start : start + seqlen]
        loss = model(ids, labels=ids, method=method, sequence_group=group).loss  # the whole sequence's
        loss.backward()  # and so are the gradients, in every process
        if step == 1 and rank == 0:
            alone = make_model()
            alone(ids, labels=ids, method=method).loss.backward()
            apart = (gradient(model) - gradient(alone)).norm() / gradient(alone).norm()
            print(f"gradient of {dist.get_world_size()} processes against one: {apart:.1e}")
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seqlen", type=int, default=4096)
    args = parser.parse_args()
    train(args.steps, args.seqlen)
