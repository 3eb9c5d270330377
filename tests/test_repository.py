"""What holds of the repository as a whole: its links, its imports, its packaging."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The direction of imports: a module may import its own level and those below it. What is not named here is on
# the level of training: it may use the model, and the model may not use it.
LEVELS = {
    "errors": 0, "files": 0,
    "kernels": 1,
    "layers": 2,
    "tile": 3, "edges": 3, "decay": 3, "loss": 3, "sweep": 3, "exact": 3, "windowed": 3, "methods": 3,
    "stack": 3, "compat": 3,
    "training": 4, "compare": 4, "plan": 4, "plan_count": 4, "data": 4, "config": 4, "checkpoint": 4,
    "plots": 4,
    "cluster": 5,
    "cli": 6, "__main__": 6, "plan_command": 6, "plan_time": 6, "plan_plot": 6, "plan_report": 6,
}  # fmt: skip
OTHERS = 4


def python_files(*folders: str) -> list[Path]:
    """Every Python file under `folders` of the repository, links not followed."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports_of(path: Path, *, at_import: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import of a file, relative ones resolved, `from a import b` as a.b.

    With `at_import`, only those that run when the file is imported: not in functions, not for type checkers.
    """

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            if not (at_import and (deferred or typing_only)):
                yield child
                yield from walk(child)

    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def run_python(code: str, *path: Path) -> str:
    """What `code` prints in a fresh interpreter outside the repository, with `path` first on sys.path."""
    prelude = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + code], cwd="/", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_is_a_namespace_portion() -> None:
    assert not (ROOT / "adjoint" / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("name", ["kernels", "cluster"])
def test_top_level_links(name: str) -> None:
    if not (ROOT / "adjoint" / name).exists():
        pytest.skip(f"adjoint/{name} is not there yet")
    assert os.readlink(ROOT / name) == f"adjoint/{name}"


def test_a_hugging_face_kernels_package_wins_over_the_link(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("OWNER = 'hugging face'\n")
    assert run_python("import kernels; print(kernels.OWNER)", ROOT, tmp_path).strip() == "hugging face"


def test_transformers_mamba_imports_with_the_repository_first_on_the_path() -> None:
    pytest.importorskip("transformers")
    assert run_python("from transformers import MambaForCausalLM as M; print(M.__name__)", ROOT).strip()


def test_import_needs_torch_and_numpy_alone() -> None:
    code = """
import torch, numpy
allowed = {*sys.stdlib_module_names, *(name.partition(".")[0] for name in sys.modules), "adjoint"}
optional = '''ray triton transformers matplotlib mamba_ssm causal_conv1d liger_kernel fla mambapy pynvml yaml
    rich tqdm safetensors tokenizers pyarrow tensorboard psutil'''.split()
for name in [n for n in sys.modules if n.partition(".")[0] in optional]:
    del sys.modules[name]

class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in optional or top not in allowed:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

sys.meta_path.insert(0, Blocker())
try:
    import matplotlib
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("the blocker does not block")
import adjoint
print(adjoint.__file__)
"""
    assert Path(run_python(code, ROOT).strip()) == ROOT / "adjoint" / "__init__.py"


def test_imports_point_down() -> None:
    wrong = []
    for path in python_files("adjoint"):
        place = path.relative_to(ROOT / "adjoint").with_suffix("").parts[0]
        if place == "__init__":
            continue
        level = LEVELS.get(place, OTHERS)
        for line, name in imports_of(path):
            parts = name.split(".")
            if parts[0] != "adjoint" or len(parts) < 2 or not _is_module(parts[1]):
                continue
            if LEVELS.get(parts[1], OTHERS) > level:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_kernels_need_only_torch_to_be_imported() -> None:
    wrong = []
    for path in python_files("adjoint/kernels"):
        known = {"torch", "numpy", "adjoint", *sys.stdlib_module_names}
        if path.stem.startswith("triton_"):  # imported by the dispatch where Triton is there
            known.add("triton")
        for line, name in imports_of(path, at_import=True):
            if name.partition(".")[0] not in known:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_short_names() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in [*python_files("adjoint", "benchmarks", "tests"), *ROOT.glob("*.py")]
        for line, name in imports_of(path)
        if name.partition(".")[0] in {"kernels", "cluster"}
    ]
    assert not wrong, "\n".join(wrong)


def test_constraints_pin_every_requirement_within_its_range() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {r.name: r for r in (Requirement(line) for line in lines if line and not line.startswith("#"))}
    versions = {canonicalize_name(name): str(r.specifier).removeprefix("==") for name, r in pins.items()}
    extras = project["optional-dependencies"]
    wanted = list(project["dependencies"])
    for requirement in extras["dev"]:
        if requirement.startswith("adjoint["):
            wanted += [r for name in Requirement(requirement).extras for r in extras[name]]
        else:
            wanted.append(requirement)
    for requirement in map(Requirement, wanted):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(version), f"{requirement} does not admit the pinned {version}"


def test_wheel_holds_the_kernels_sources_and_no_short_names(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    shutil.copytree(ROOT / "adjoint", source / "adjoint", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "kernels").symlink_to("adjoint/kernels")
    code = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "adjoint").rglob("*")}
    expected = {name for name in sources if name.endswith((".py", ".cpp", ".h"))}
    assert {name for name in names if name.endswith((".py", ".cpp", ".h"))} == expected
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"adjoint"}


def _is_module(name: str) -> bool:
    return (ROOT / "adjoint" / f"{name}.py").exists() or (ROOT / "adjoint" / name).is_dir()
