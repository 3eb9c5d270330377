"""How a benchmark is run: its command line, its points one after the other, what is kept, written and shown.

A `Benchmark` says what varies, how a point is measured, and what is made of the results. Each point is
measured in a fresh process and kept in a journal at once (`adjoint.tools.measure`): a run that was stopped
goes on where it was. Results go to runs/benchmarks/NAME, or `--out`: what lies in benchmarks/results and in
the documents is replaced with `--publish` only, by whole runs in which nothing failed.

A machine with a GPU may have no more than PyTorch and NumPy: other packages are imported where they are used.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import json
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from adjoint.files import write_atomically
from adjoint.settings import size_bytes, whole_number
from adjoint.tools.measure.journal import Journal, progress
from adjoint.tools.measure.process import ROOT, Point, Process
from benchmarks import report
from benchmarks.report import Row

RESULTS, RUNS = ROOT / "benchmarks" / "results", ROOT / "runs" / "benchmarks"
Found = list[tuple[Point, Point]]  # points, and what is known of each
TROUBLES = ("error", "out_of_memory", "stopped")  # what a result has where a point has no numbers


def successes(measurements: Found) -> Found:
    """Return the points that have numbers, with their results."""
    return [(point, result) for point, result in measurements if not result.keys() & set(TROUBLES)]


# ----------------------------------------------------------------------------------------------- command line


def count(text: str) -> int:
    """A `type=` of argparse: 16384, 16K or 1M, and no less than one."""
    if (number := whole_number(text)) < 1:
        raise ValueError
    return number


def size(text: str) -> int:
    """A `type=` of argparse: bytes of 18GB (10⁹ each) or 18GiB (2³⁰ each)."""
    return int(size_bytes(text))


def add_choice(parser: argparse.ArgumentParser, flag: str, names: Collection[str]) -> None:
    """A flag that takes one or more of `names`, by default all."""
    parser.add_argument(
        flag, nargs="+", choices=names, default=list(names), metavar="NAME", help=", ".join(names)
    )


def add_counts(parser: argparse.ArgumentParser, **flags: tuple[Any, str]) -> None:
    """Flags that take a count, or where the default is a list several: default and help of each."""
    for name, (default, text) in flags.items():
        several: dict[str, Any] = {"nargs": "+"} if isinstance(default, list) else {}
        parser.add_argument(f"--{name.replace('_', '-')}", type=count, default=default, help=text, **several)


def device(text: str) -> str:
    """A `type=` of argparse: the CPU, or a GPU that is here."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise ValueError
    if text != "cpu" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"torch sees no {text} here")
    return text


# ---------------------------------------------------------------------------------------------------- journal


def fingerprint(sources: Iterable[Path], environment: Mapping[str, Any], packages: Collection[str]) -> str:
    """Return a hash of the code, the machine, and the versions of `packages`, or of all if it is empty."""
    versions = {k: v for k, v in environment["versions"].items() if not packages or k in packages}
    digest = hashlib.sha256(repr((versions, environment["gpu"] or environment["cpu"])).encode())
    for path in sorted(sources):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


# -------------------------------------------------------------------------------------------------- benchmark


class Benchmark:
    """The definition of one benchmark. Its module's docstring is the help of its command.

    Attributes:
        name: of its command and of its files.
        module: full name of the module whose `measure(point)` measures a point.
        uses: files and folders of benchmarks/ that its measurements depend on, besides the shared ones.
        packages: whose versions they depend on; empty: all that are noted.
        limiting_options: options that leave something out: only runs with their defaults can be published.
        ratios: fields, the base's fields, and the fields in which a row agrees with its base.
        document, mark: where `--publish` puts the table, between which marks.
        caption: of the picture, where the document has it above the table.
        keeps_journal: also after a complete run, so that the next one need not measure the same again.
        quiet: keep what its processes write to stderr away from the terminal.
        one_thread: its processes compute on one thread, and warn of nothing.
    """

    name = ""
    module = ""
    uses: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    limiting_options: tuple[str, ...] = ()
    ratios: tuple[tuple[str, ...], Row, tuple[str, ...]] | None = None
    document = ""
    mark = ""
    caption = ""
    keeps_journal = False
    quiet = True
    one_thread = False

    # What a benchmark says.

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its flags."""

    def check(self, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        """Complete the options; end with `parser.error` where they cannot be."""

    def requirements(self, options: argparse.Namespace) -> Mapping[str, str]:
        """Return the packages without which points would fail, besides those of `.[dev]`, each with the way
        to install it."""
        return {}

    def environment(self, options: argparse.Namespace) -> Row:
        """Return the machine and the versions that it runs with."""
        return report.environment()

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        """Return what the results hold besides environment and rows."""
        return {}

    def points(self, options: argparse.Namespace) -> list[Point]:
        """Everything to be measured, in order."""
        raise NotImplementedError

    def describe(self, point: Point) -> str:
        """A point in a few words."""
        words = (v for v in point.values() if isinstance(v, str | int) and not isinstance(v, bool))
        return " ".join(f"{v:,}" if isinstance(v, int) else v for v in [*words][:4])

    def more_points(self, options: argparse.Namespace, measurements: Found) -> list[Point]:
        """Return further points to measure, chosen by the measurements so far."""
        return []

    def skip(self, point: Point, measurements: Found, options: argparse.Namespace) -> str | None:
        """Return why a point is left out; "" for a reason that is not reported, None to run it."""
        return None

    def env(self, point: Point, options: argparse.Namespace) -> Mapping[str, str]:
        """Environment variables of its process."""
        return {"OMP_NUM_THREADS": "1", "ADJOINT_VERBOSITY": "warning"} if self.one_thread else {}

    def shared(self, point: Point) -> str | None:
        """Points that share a process have the same here; None: a process of its own."""
        return None

    def limit_s(self, point: Point, options: argparse.Namespace) -> float:
        """Seconds after which a point is given up."""
        return float("inf")

    def settled(self, result: Point) -> bool:
        """Whether a point with this result is not to be measured again."""
        return "error" not in result

    def noted(self, result: Point, seconds: float) -> Point:
        """A result as the journal keeps it, of a point that took so many seconds."""
        return result

    def broken(self, options: argparse.Namespace, measurements: Found) -> bool:
        """Whether a point failed."""
        return any("error" in result for _, result in measurements)

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        """A line of the results for each thing that was compared: here for each point."""
        return [{**point, **result} for point, result in measurements]

    def failed(self, result: Row) -> bool:
        """Whether what was measured is not as it has to be."""
        return False

    def markdown(self, result: Row) -> str:
        """The tables."""
        raise NotImplementedError

    def shown(self, result: Row) -> str:
        """Return what the document shows of `markdown`: all of it, unless a reader needs less."""
        return self.markdown(result)

    def page(self, result: Row) -> str:
        """Return the Markdown that is printed and written."""
        return f"{report.with_footers(self.markdown(result), report.footer(result['environment']))}\n"

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        """Pictures: what their names have after the benchmark's, the figure, and what stands below it."""
        return iter(())

    # How it is run.

    def stem(self, options: argparse.Namespace) -> str:
        """The name of its files."""
        return self.name if getattr(options, "device", "cpu") == "cpu" else f"{self.name}-cuda"

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Read the command line. Wrong values end the program with exit code 2 and one line."""
        description = (sys.modules[type(self).__module__].__doc__ or "").partition("\n")[0]
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{self.name}", description=description,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )  # fmt: skip
        add = parser.add_argument
        add("--out", type=Path, help=f"folder of the results (default runs/benchmarks/{self.name})")
        add("--fresh", action="store_true", help="measure again what was measured before")
        add("--publish", action="store_true", help="replace benchmarks/results and the tables in documents")
        add("--redraw", action="store_true", help="measure nothing: tables and pictures of results once more")
        self.arguments(parser)
        options = parser.parse_args(arguments)
        partly = [
            name for name in self.limiting_options if getattr(options, name) != parser.get_default(name)
        ]
        inside = options.out is not None and RESULTS in (
            options.out.resolve(),
            *options.out.resolve().parents,
        )
        if inside and not options.publish:
            parser.error(f"--out {options.out}: what is published is replaced with --publish only")
        if options.publish and partly and not inside:
            parser.error(f"--publish is for whole runs: leave out --{partly[0].replace('_', '-')}")
        self.check(parser, options)
        for package, way in {} if options.redraw else self.requirements(options).items():
            if importlib.util.find_spec(package) is None:
                parser.error(f"{package} is not installed: {way}")
        return options

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run the command. 0: done; 1: something failed, or is not as it has to be; 2: wrong options; 130:
        Ctrl-C or SIGTERM."""
        options = self.parse(arguments)
        folder, stem = options.out or RUNS / self.name, self.stem(options)
        if options.redraw:
            result, failed = self.load((options.out or RESULTS) / stem), False
        else:
            result, failed = self.run(options, folder)
        if result["complete"] or result["rows"]:
            self.show(result, folder / stem)
        if not result["complete"]:
            return 130
        failed = failed or self.failed(result)
        if options.publish and failed:
            print("Not published, as something failed.", file=sys.stderr)
        elif options.publish:
            self.publish(result, folder / stem)
        return int(failed)

    def run(self, options: argparse.Namespace, folder: Path) -> tuple[Row, bool]:
        """Measure what the journal lacks; the results, and whether a point failed. What is known is written
        after every point."""
        environment, stem = self.environment(options), self.stem(options)
        result = {"benchmark": self.name, "environment": environment, "complete": False}
        sweep = _Sweep(self, options, self.journal(folder, stem, environment, options.fresh))

        def save() -> None:
            measurements = sweep.known()
            result.update({**self.payload(options, measurements), "rows": self.rows(options, measurements)})
            self.save(result, folder / stem)

        sweep.save = save
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            sweep.run(sweep.points)
            more = self.more_points(options, sweep.known())
            sweep.points += more
            sweep.run(more)
            result["complete"] = True
        except KeyboardInterrupt:
            print("Stopped. The same command goes on from here.", file=sys.stderr)
        finally:
            signal.signal(signal.SIGTERM, before)
        save()
        failed = self.broken(options, sweep.known())
        if result["complete"] and not failed and not self.keeps_journal:
            shutil.rmtree(folder / "partial")
        return result, failed

    def journal(self, folder: Path, stem: str, environment: Row, fresh: bool) -> Journal:
        """The journal folder/partial/stem.jsonl; says on stderr whether it is continued."""
        place = ROOT / "benchmarks"
        modules = [self.module.split(".")[1], *self.uses, "steps", "timing"]
        sources = [p for name in modules for p in (place / f"{name}.py", *(place / name).glob("*.py"))]
        sources = [p for p in sources if p.exists() and p.name not in ("report.py", "command.py")]
        package = (p for p in (ROOT / "adjoint").rglob("*") if p.suffix in {".py", ".cpp", ".h"})
        mark = fingerprint({*sources, *package}, environment, self.packages)
        journal = Journal(folder / "partial" / f"{stem}.jsonl", mark, fresh=fresh)
        if journal.discarded:
            print(
                "The code or the machine has changed since the last run: measuring all of it.",
                file=sys.stderr,
            )
        elif journal.done:
            print(f"Going on: {len(journal.done)} points were finished before.", file=sys.stderr)
        return journal

    def load(self, stem: Path) -> Row:
        """Results as `save` writes them."""
        return {"complete": True, **json.loads(stem.with_name(f"{stem.name}.json").read_text())}

    def save(self, result: Row, stem: Path) -> None:
        """Write stem.json."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(stem.with_name(f"{stem.name}.json"), json.dumps(result, indent=1) + "\n")

    def show(self, result: Row, stem: Path) -> None:
        """Print the tables; write stem.md and the pictures."""
        stem.parent.mkdir(parents=True, exist_ok=True)
        if self.ratios is not None:
            report.add_ratios(result["rows"], *self.ratios)
        text = self.page(result)
        print(text)
        stem.with_name(f"{stem.name}.md").write_text(text)
        try:
            for suffix, figure, foot in self.figures(result):
                report.save(figure, stem.with_name(f"{stem.name}{suffix}.png"), foot)
        except ImportError:
            print("no picture: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        print(f"wrote {stem}.*")

    def tables(self, result: Row) -> Iterator[tuple[str, str, str]]:
        """Yield what documents show of the results: a document, the name of marks, the text between them."""
        if self.document:
            picture = f"![{self.caption}]({self.name}.png)\n\n" if self.caption else ""
            yield self.document, self.mark or self.name, picture + self.shown(result)

    def published(self, result: Row) -> Iterator[tuple[str, str, str]]:
        """Yield `tables` as documents have them: their marks in full, and below each table its run."""
        for document, mark, table in self.tables(result):
            footer = report.footer_in(document, result["environment"])
            yield document, f"{mark} table", report.with_footers(table, footer)

    def publish(self, result: Row, stem: Path) -> None:
        """Put the results into benchmarks/results, tables and pictures into the documents; of a folder inside
        benchmarks/results nothing, as they are there."""
        if RESULTS in stem.resolve().parents:
            return
        place = RESULTS / stem.name
        self.save(result, place)
        self.show(result, place)
        if stem.name == self.name:
            for drawn in place.parent.glob(f"{self.name}*.png"):
                if (ROOT / "docs" / drawn.name).exists() or (self.caption and drawn.stem == self.name):
                    shutil.copyfile(drawn, ROOT / "docs" / drawn.name)
            for document, mark, text in self.published(result):
                report.put_table(ROOT / document, mark, text)


class _Sweep:
    """A run that measures the points that are not settled, in `options.jobs` processes at a time, or in one.

    Attributes:
        told: results of points that are not in the journal.
    """

    def __init__(self, benchmark: Benchmark, options: argparse.Namespace, journal: Journal) -> None:
        self.benchmark, self.options, self.journal = benchmark, options, journal
        self.points, self.told = benchmark.points(options), dict[str, Point]()
        self.lock, self.stopped = threading.Lock(), False
        self.processes: list[Process] = []
        self.save: Callable[[], object] = lambda: None  # is called after every change

    def known(self) -> Found:
        """Return each point that has a result, with the result."""
        everything = self.journal.done | self.told
        return [(p, everything[k]) for p in self.points if (k := self.journal.key(p)) in everything]

    def run(self, points: Sequence[Point]) -> None:
        """Measure; a point that fails is recorded, not raised."""
        jobs, waiting = getattr(self.options, "jobs", 1), iter(points)
        self.stopped = False
        with progress(len(points)) as self.progress:
            try:
                if jobs == 1:
                    return self._work(waiting)
                threads = [threading.Thread(target=self._work, args=(waiting,)) for _ in range(jobs)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            finally:
                self.stopped = True
                for process in self.processes:
                    process.close()

    def _work(self, points: Iterator[Point]) -> None:
        benchmark, process, serves = self.benchmark, Process(""), None
        while (point := self._next(points)) is not None:
            shared, key = benchmark.shared(point), self.journal.key(point)
            if shared is None or shared != serves:
                process.close()
                env = benchmark.env(point, self.options)
                process, serves = Process(benchmark.module, env, quiet=benchmark.quiet), shared
                self.processes.append(process)
            process.partial = functools.partial(self._tell, key)
            began = time.monotonic()
            result = process.measure(point, benchmark.limit_s(point, self.options))
            if self.stopped:
                return
            with self.lock:
                self.told.pop(key, None)
                self.journal.add(point, benchmark.noted(result, time.monotonic() - began))
                for trouble in TROUBLES:
                    if trouble in result:
                        self.progress(f"    {trouble.replace('_', ' ')}: {result[trouble]}", 0)
                self.save()
        process.close()

    def _next(self, points: Iterator[Point]) -> Point | None:
        """The next point that is to be measured."""
        with self.lock:
            for point in () if self.stopped else points:
                self.progress("", 1)
                result = self.journal.get(point)
                if result is not None and self.benchmark.settled(result):
                    continue
                reason = self.benchmark.skip(point, self.known(), self.options)
                if reason is None:
                    self.progress(self.benchmark.describe(point), 0)
                    return point
                if reason:
                    self.told[self.journal.key(point)] = {"skipped": reason}
        return None

    def _tell(self, key: str, partial_result: Point) -> None:
        with self.lock:
            self.told[key] = {"under_way": partial_result}
            self.save()
