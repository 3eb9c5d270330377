"""One sequence shared by several processes, in a plain loop: the gradients are those of one process.

torchrun --nproc-per-node 2 examples/sequence.py --steps 10
torchrun --nproc-per-node 2 examples/sequence.py --pretrained path/to/model    # a causal LM of transformers
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import adjoint

METHOD = adjoint.Exact(chunk_size=256)


def make_model(pretrained: str | None) -> Any:
    torch.manual_seed(0)  # every process begins with the same weights
    if pretrained is None:
        return adjoint.Stack(adjoint.StackConfig(vocab_size=256, d_model=128, n_layer=4, mixer="mamba2"))
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(pretrained)


def loss_of(model: Any, ids: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The whole sequence's, in every process of the group; without a group this process's own."""
    if isinstance(model, adjoint.Stack):
        return model(ids, labels=ids, method=METHOD, sequence_group=group).loss
    return adjoint.wrap(model, METHOD, sequence_group=group)(input_ids=ids, labels=ids).loss


def gradient(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def train(steps: int, seqlen: int, pretrained: str | None) -> None:
    dist.init_process_group("gloo")  # with GPUs "nccl"; torchrun has set what it reads
    rank, group = dist.get_rank(), dist.group.WORLD
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    text = torch.tensor(list(Path(os.__file__).read_bytes()))  # Python's own library, a byte a token
    model = make_model(pretrained)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3 if pretrained is None else 2e-5)
    generator = torch.Generator().manual_seed(1)  # every process has the same rows
    for step in range(1, steps + 1):
        start = int(torch.randint(len(text) - seqlen, (), generator=generator))
        ids = text[None, start : start + seqlen]
        loss = loss_of(model, ids, group)
        loss.backward()  # the gradients too are the whole's, in every process
        if step == 1 and rank == 0:
            alone = make_model(pretrained)
            loss_of(alone, ids).backward()
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
    parser.add_argument(
        "--pretrained", help="folder, or name on the hub, of a causal LM; its ids are bytes here"
    )
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("torchrun starts its processes: torchrun --nproc-per-node 2 examples/sequence.py")
    train(args.steps, args.seqlen, args.pretrained)
