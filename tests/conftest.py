"""What tests share: a cache of their own, but for the compiled kernels; `one_thread`, and `here`."""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes share the cores. Set before torch is imported, so that it holds for every thread and process
    # that a test starts, too: with two OpenMP threads each they wait for one another most of the time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gc.disable()  # until all is imported and collected: nothing of it is garbage

import torch

from adjoint.kernels.cpu import build as cpu_build
from adjoint.memory import print_sizes_as, release_freed_memory
from adjoint.tools.measure import process
from adjoint.train import plots


def import_before_fork() -> None:
    """Import what a backward imports on its first run, so that forked processes do not import it each."""
    import torch._dynamo  # noqa: F401

    if "transformers" in sys.modules:
        with contextlib.suppress(ImportError):
            import peft  # noqa: F401


os.register_at_fork(before=import_before_fork)
# Garbage of the parent is never collected in a forked process: an earlier test's process group, at its end,
# would wait there for threads that only the parent has.
os.register_at_fork(after_in_child=gc.freeze)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has it ignored, and a run then goes on, as it should


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Under several processes one has all tests that need Ray: one Ray is enough. Of a test marked sampled(n)
    every n-th case runs by default, the others are slow: the first decorator's parameter varies fastest, so n
    should have no factor in common with the number of its values, or some of them never run."""
    cases: collections.Counter[str] = collections.Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled is not None:
            name = item.nodeid.partition("[")[0]
            if cases[name] % sampled.args[0]:
                item.add_marker(pytest.mark.slow)
            cases[name] += 1
        if "ray_on_loopback" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ray"))


def pytest_collection_finish() -> None:
    """Spare each garbage collection the walk over all modules and tests, which takes half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def own_size_unit() -> Iterator[None]:
    """Forgets the unit of sizes that a test's command was given, as the end of a process does."""
    yield
    print_sizes_as(None)


@pytest.fixture(autouse=True, scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Points $ADJOINT_CACHE at a fresh folder; its kernels/ leads to the usual place: built only once."""
    kernels = cpu_build.cache_dir()
    cpu_build.load()  # now, so that a test that takes the cache away does not have them built again
    folder = tmp_path_factory.mktemp("adjoint-cache")
    if kernels.is_dir():
        (folder / "kernels").symlink_to(kernels.resolve(), target_is_directory=True)
    before = os.environ.get("ADJOINT_CACHE")
    os.environ["ADJOINT_CACHE"] = str(folder)
    yield folder
    if before is None:
        del os.environ["ADJOINT_CACHE"]
    else:
        os.environ["ADJOINT_CACHE"] = before


@pytest.fixture(autouse=True, scope="session")
def quick_files() -> Iterator[None]:
    """Draws no losses, which takes longer than a tiny run, and does not wait for the disk.

    A test of the picture puts `adjoint.files.save_figure` back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "save_figure", lambda figure, path: Path(path).touch())
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models mostly wait for a second thread, far longer where other programs want the cores too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ray_on_loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One small Ray for all tests of a file, which listens on loopback alone; its daemons are never idle."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("needs ray")
    # before ray is imported: it is read then
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_worker_niceness", "0")
    # no idle workers, each of which imports Ray
    os.environ |= {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
    os.environ["ADJOINT_TEST_FAULT"] = str(tmp_path_factory.mktemp("fault") / "fault.json")
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=150 << 20,
        logging_level="error",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}},
    )
    yield
    ray.shutdown()


@pytest.fixture
def refused_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that starts a tiny run, by its flags, and returns its only error, a line with some words."""

    def refuse(words: str, **flags: Any) -> str:
        from tests.training_helpers import train_tiny

        capsys.readouterr()
        assert train_tiny(tmp_path, **flags) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and words in errors[0], errors
        assert not (tmp_path / "run").exists()
        return errors[0]

    return refuse


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Measures points in this process, which saves the imports, and lists them."""
    points: list[dict[str, Any]] = []

    def measure(self: Any, point: dict[str, Any], limit_s: float = 0.0) -> Any:
        points.append(point)
        module = importlib.import_module(self.module)
        gc.collect()  # what earlier tests have left: handed back during a measurement, it would count below 0
        release_freed_memory()
        return json.loads(json.dumps(process.answer(module.measure, json.loads(json.dumps(point)))))

    monkeypatch.setattr(process.Process, "measure", measure)
    return points
