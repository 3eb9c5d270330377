"""A loop of accelerate under ZeRO-3, which `accelerate launch` starts: losses, wrapped and not, are alike."""

from __future__ import annotations

import copy
import logging
import sys

import deepspeed
import torch
from accelerate import Accelerator

import adjoint
from tests.hf.hf_models import VOCAB, make

STEPS = 3


def losses(accelerator: Accelerator, model: torch.nn.Module) -> list[float]:
    values = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(3, VOCAB, (2 * STEPS * accelerator.num_processes, 53), generator=generator)
    loader = torch.utils.data.DataLoader(rows, batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for ids in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        values.append(float(loss))
    return values


def main() -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # for which a compiler would run
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        model, by_way = make(name, torch.float32), []
        for wraps in (False, True):
            accelerator = Accelerator()
            copied = copy.deepcopy(model)
            by_way.append(losses(accelerator, adjoint.wrap(copied, adjoint.Exact(16)) if wraps else copied))
            accelerator.free_memory()
        difference = max(abs(a - b) for a, b in zip(*by_way, strict=True))
        line = f"{name} {len(by_way[1])} {by_way[0][0]:.3f} {by_way[0][-1]:.3f} {difference:.1e}\n"
        sys.stdout.write(line)  # at once, so that no other rank's stands between it and its end
        sys.stdout.flush()
        assert len(by_way[1]) == 2 * STEPS and difference < 1e-4, by_way


if __name__ == "__main__":
    main()
