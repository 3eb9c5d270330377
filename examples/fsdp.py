"""FSDP2 (fully_shard) with chunks, on CPUs and on GPUs: parameters, gradients and moments are sharded over
processes, and each process has a long sequence of its own.

torchrun --nproc-per-node 2 examples/fsdp.py --steps 10
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import Mamba2Config, Mamba2ForCausalLM

import adjoint


def make_model(device: torch.device) -> torch.nn.Module:
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
    return adjoint.wrap(Mamba2ForCausalLM(config).to(device), adjoint.Exact(chunk_size=512))


def gradients(model: torch.nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    model(input_ids=ids, labels=ids).loss.backward()
    return [p.grad for p in model.parameters()]


def train(steps: int, seqlen: int) -> None:
    rank, processes = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    text = torch.tensor(list(Path(os.__file__).read_bytes()))  # Python's own library, a byte a token
    mesh = dist.init_device_mesh(device.type, (processes,))
    model = make_model(device)
    for layer in model.backbone.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)  # the same batches everywhere; each process takes its row
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - seqlen, (processes,), generator=generator).tolist()
        rows = torch.stack([text[start : start + seqlen] for start in starts]).to(device)
        loss = model(input_ids=rows[rank : rank + 1], labels=rows[rank : rank + 1]).loss
        loss.backward()
        if step == 1:
            sharded = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()])
            if rank == 0:
                alone = torch.cat([g.flatten() for g in gradients(make_model(device), rows)])
                apart = (sharded - alone).norm() / alone.norm()
                print(f"gradient of {processes} processes against one: {apart:.1e}")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seqlen", type=int, default=2048)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("torchrun starts its processes: torchrun --nproc-per-node 2 examples/fsdp.py")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(args.steps, args.seqlen)
    dist.destroy_process_group()
