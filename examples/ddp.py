"""DistributedDataParallel on two processes of this machine: the gradients are those of one process.

python examples/ddp.py --steps 10
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
from transformers import Mamba2Config, Mamba2ForCausalLM

import adjoint

PROCESSES = 2


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)  # every process begins with the same weights
    config = Mamba2Config(
        vocab_size=256,
        hidden_size=128,
        num_hidden_layers=4,
        state_size=16,
        num_heads=8,
        head_dim=32,
        n_groups=1,
    )
    return adjoint.wrap(Mamba2ForCausalLM(config), adjoint.Exact(chunk_size=512))


def gradient(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def train(rank: int, store: str, steps: int, seqlen: int) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // PROCESSES))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    text = torch.tensor(list(Path(os.__file__).read_bytes()))  # Python's own library, a byte a token
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)  # the same batches everywhere; each process takes its row
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - seqlen, (PROCESSES,), generator=generator).tolist()
        rows = torch.stack([text[start : start + seqlen] for start in starts])
        mine = rows[rank : rank + 1]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()  # DDP averages the gradients of the processes
        if step == 1 and rank == 0:
            averaged = torch.cat([p.grad.flatten() for p in model.parameters()])
            alone = gradient(make_model(), rows)
            print(f"gradient of two processes against one: {(averaged - alone).norm() / alone.norm():.1e}")
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)
    del model  # before the group: freed after it, torch's DDP now and then does not end
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seqlen", type=int, default=2048)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(f"{folder}/store", args.steps, args.seqlen), nprocs=PROCESSES)
