"""Threads that call one `Stack`: each gets the results of a call by itself."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Backprop, Exact, Stack, StackConfig

VOCAB, WIDTH = 29, 32
Job = Callable[[Stack, list[Tensor], Tensor], list[Tensor]]


def make_stack(mixers: tuple[str, ...], **options: Any) -> Stack:
    config = StackConfig(
        vocab_size=VOCAB, d_model=WIDTH, n_layer=len(mixers), mixer=[*mixers], headdim=16, **options
    )
    return Stack(config, seed=1).double()


def train(method: Any) -> Job:
    def run(stack: Stack, parameters: list[Tensor], ids: Tensor) -> list[Tensor]:
        loss = stack(ids, ids, method).loss
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    return run


def train_on_hidden_states(stack: Stack, parameters: list[Tensor], ids: Tensor) -> list[Tensor]:
    hidden = stack(ids, method=Exact(5), return_hidden_states=True).hidden_states
    reached = [p for p in parameters if p is not stack.lm_head.weight]
    return [hidden.detach(), *torch.autograd.grad(hidden.square().sum(), reached, allow_unused=True)]


@torch.no_grad()
def evaluate(stack: Stack, _: list[Tensor], ids: Tensor) -> list[Tensor]:
    return [stack(ids).logits, stack(ids, ids, Exact(5)).loss, stack.generate(ids, 3, temperature=0.0)]


@pytest.fixture(autouse=True)
def short_turns() -> Iterator[None]:
    """Let Python's threads take short turns, so that they meet inside of chunks."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], list[Job]]] = {
    "two train": (("mamba", "attention"), {}, [train(Exact(5)), train(Exact(5))]),
    "train and evaluate": (("mamba2", "mamba2"), {}, [train(Exact(5, segment_layers=1))] * 2 + [evaluate]),
    "beside plain autograd": (
        ("mamba2", "attention"),
        {},
        [train(Exact(5)), train(None), train(Backprop(checkpoint=True)), train_on_hidden_states],
    ),
    "memory budget": (("mamba",), {}, [train(Exact(memory=1 << 20)), train(Exact(4, checkpoints=2))]),
    "both directions": (("mamba2", "mamba2"), {"bidirectional": "tied"}, [train(Exact(5)), train(Exact(5))]),
}


@pytest.mark.sampled(29)
@pytest.mark.parametrize("name", CASES)
def test_threads_that_call_one_stack(name: str) -> None:
    """Results are right from the first call on, which may verify the stack."""
    mixers, options, jobs = CASES[name]
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, VOCAB, (2, 23), generator=generator) for _ in jobs]
    reference = make_stack(mixers, **options)
    reference_parameters = list(reference.parameters())
    expected = [job(reference, reference_parameters, x) for job, x in zip(jobs, ids, strict=True)]
    stack = make_stack(mixers, **options)
    parameters, problems = list(stack.parameters()), list[str]()
    barrier = threading.Barrier(len(jobs))

    def work(job: Job, x: Tensor, right: list[Tensor]) -> None:
        barrier.wait(60)
        for _ in range(4):
            try:
                for result, value in zip(job(stack, parameters, x), right, strict=True):
                    if result is not None or value is not None:
                        torch.testing.assert_close(result, value)
            except Exception as error:
                problems.append(repr(error))

    threads = [threading.Thread(target=work, args=each) for each in zip(jobs, ids, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not problems, problems[0]


def test_gradients_of_threads_add_up() -> None:
    """Backwards of several threads add to `.grad`."""
    stack, ids = make_stack(("mamba", "attention")), torch.arange(46).view(2, 23) % VOCAB
    stack(ids, ids, Exact(5)).loss.backward()
    once = [p.grad.clone() for p in stack.parameters() if p.grad is not None]
    stack.zero_grad()
    threads = [threading.Thread(target=lambda: stack(ids, ids, Exact(5)).loss.backward()) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for p, gradient in itertools.zip_longest(stack.parameters(), once):
        torch.testing.assert_close(p.grad, 4 * gradient)


def test_models_of_different_threads_do_not_wait_for_each_other() -> None:
    """A thread in the middle of one stack's call; another stack runs meanwhile."""
    first, second = make_stack(("mamba",)), make_stack(("mamba",))
    ids, done = torch.arange(23)[None], threading.Event()

    def run_second(*_: object) -> None:
        thread = threading.Thread(target=lambda: (second(ids, ids, Exact(5)).loss.backward(), done.set()))
        thread.start()
        thread.join(60)

    first.layers[0].register_forward_pre_hook(lambda *_: None if done.is_set() else run_second())
    first(ids, ids, adjoint.Exact(5)).loss.backward()
    assert done.is_set()
