"""Tries random cases until the time is up; what deviates is written down, made smaller and listed at the end.

python -m tests.fuzz --minutes 60 --kinds stacks,wrapped --seed 7
python -m tests.fuzz --case '{"kind": "stacks", ...}'    one case again, with its traceback
python -m tests.fuzz --cases runs/fuzz.jsonl    those that failed, once more
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import multiprocessing
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tests.fuzz import KINDS

LIMIT = 60.0  # seconds a case
SMALLER = 20.0  # seconds spent on making a failure smaller

Outcome = tuple[str, str]  # "" where it holds, "vacuous", "refused" or the kind of failure; and what was said


def module_of(kind: str) -> Any:
    return importlib.import_module(f"tests.fuzz.{kind}")


def draw(kind: str, seed: Any) -> dict[str, Any]:
    return module_of(kind).draw(random.Random(str(seed)))


def judge(case: dict[str, Any]) -> Outcome:
    from tests.fuzz.oracle import Refusal, Vacuous, where

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module_of(case["kind"]).check(case)
    except Vacuous as nothing:
        return "vacuous", str(nothing)
    except Refusal as refusal:
        return "refused", str(refusal)
    except Exception as failure:
        return where(failure), " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
    return "", ""


def _serve(connection: Any, kinds: list[str]) -> None:
    import torch

    torch.set_num_threads(1)
    for kind in kinds:
        getattr(module_of(kind), "prepare", lambda: None)()
    connection.send("ready")
    while True:
        connection.send(judge(connection.recv()))


class Worker:
    """A process that judges cases: that it hangs or crashes is a outcome too, and another takes its place."""

    def __init__(self, kinds: list[str]) -> None:
        self.kinds = kinds
        self.process: Any = None

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.kinds), daemon=True)
        self.process.start()
        theirs.close()
        self.connection.recv()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None

    def judge(self, case: dict[str, Any]) -> Outcome:
        if self.process is None:
            self.start()
        try:
            self.connection.send(case)
            if self.connection.poll(LIMIT):
                return self.connection.recv()
            self.stop()
            return "hangs", f"no answer in {LIMIT:.0f} s"
        except (EOFError, ConnectionError):
            self.process.join()
            code, self.process = self.process.exitcode, None
            return "crashes", f"exit code {code}"


def smaller(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The case without one of its options, or with one number made smaller."""
    for key, value in case.items():
        if key in ("kind", "seed", "name"):
            continue
        rest = {k: v for k, v in case.items() if k != key}
        yield rest
        if isinstance(value, dict):
            yield from ({**case, key: v} for v in smaller(value))
        elif isinstance(value, list):
            yield from ({**case, key: value[:i] + value[i + 1 :]} for i in range(len(value)))
        elif isinstance(value, int) and not isinstance(value, bool):
            yield from ({**case, key: v} for v in sorted({1, value // 2, value - 1}) if 0 < v < value)


def shrink(worker: Worker, case: dict[str, Any], kind: str) -> dict[str, Any]:
    """The smallest case found in a while that fails in the same way."""
    until, found = time.monotonic() + SMALLER, True
    while found:
        found = False
        for candidate in smaller(case):
            if time.monotonic() > until:
                return case
            if worker.judge(candidate)[0] == kind:
                case, found = candidate, True
                break
    return case


def again(file: Path) -> int:
    lines = [line for line in file.read_text().splitlines() if line.startswith("{")]
    cases = [json.loads(line) for line in lines]
    worker, failed = Worker(sorted({case["kind"] for case in cases})), 0
    for line, case in zip(lines, cases, strict=True):
        outcome, said = worker.judge(case)
        failed += outcome not in ("", "vacuous", "refused")
        print(f"{outcome or 'holds'}: {said}\n  {line}", flush=True)
    worker.stop()
    print(f"{failed} of {len(cases)} cases deviate")
    return 1 if failed else 0


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--seed", type=int, default=None, help="of the run; drawn if not given")
    parser.add_argument("--case", help="one case, as JSON")
    parser.add_argument("--cases", type=Path, help="a file of cases, a line each: such as that of --out")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz.jsonl"), help="where failures are added")
    arguments = parser.parse_args(given)
    if arguments.case:
        module = module_of((case := json.loads(arguments.case))["kind"])
        module.check(case)
        print("it holds")
        return 0
    if arguments.cases:
        return again(arguments.cases)
    kinds = arguments.kinds.split(",")
    seed = random.SystemRandom().randrange(10**6) if arguments.seed is None else arguments.seed
    tqdm.write(f"seed {seed}: python -m tests.fuzz --kinds {arguments.kinds} --seed {seed}")
    counts: dict[str, collections.Counter[str]] = {kind: collections.Counter() for kind in kinds}
    refusals: dict[str, list[str]] = collections.defaultdict(list)
    failures: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    worker, begun, number = Worker(kinds), time.monotonic(), 0
    with tqdm(total=round(60 * arguments.minutes), unit="s", bar_format="{l_bar}{bar}| {postfix}") as bar:
        while (passed := time.monotonic() - begun) < 60 * arguments.minutes:
            kind = kinds[number % len(kinds)]
            case = draw(kind, f"{seed}:{number}")
            number += 1
            outcome, said = worker.judge(case)
            counts[kind]["cases"] += 1
            counts[kind][outcome if outcome in ("", "vacuous", "refused") else "deviations"] += 1
            if outcome == "refused":
                refusals[f"{kind}: {said}"].append(json.dumps(case))
            elif outcome not in ("", "vacuous"):
                worker.stop()
                alone = worker.judge(case)[0]  # in a process that has seen no other case
                known = failures[kind, outcome]
                if alone == outcome and len(known) < 4:
                    case = shrink(worker, case, outcome)
                note = "" if alone == outcome else f" (only after the cases before it, number {number - 1})"
                known.append(line := json.dumps(case))
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                with arguments.out.open("a") as file:
                    file.write(line + "\n")
                tqdm.write(f"\n{kind}, seed {seed}, {outcome}: {said}{note}\n  {line}")
            bar.n = min(bar.total, round(passed))
            bar.set_postfix_str(", ".join(f"{k} {c['cases']} ({c['deviations']})" for k, c in counts.items()))
    worker.stop()
    for kind, counted in counts.items():
        rest = ", ".join(f"{counted[v]} {v}" for v in ("vacuous", "refused", "deviations") if counted[v])
        print(f"{kind}: {counted['cases']} cases{', ' + rest if rest else ''}")
    for said, lines in sorted(refusals.items(), key=lambda item: -len(item[1])):
        print(f"refused {len(lines)} times: {said}\n  {min(lines, key=len)}")
    for (kind, outcome), lines in failures.items():
        print(f"{kind}, {outcome}, {len(lines)} times:", *lines[:3], sep="\n  ")
    return 1 if failures else 0
