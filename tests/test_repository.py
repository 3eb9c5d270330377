"""What holds of the repository as a whole: its links, its imports, its packaging."""

from __future__ import annotations

import ast
import functools
import gc
import graphlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import adjoint
from adjoint import layers, releases
from adjoint.engine.model import ChunkedModel
from adjoint.engine.sharded_model import ShardedModel
from adjoint.engine.sweep import Sweep
from adjoint.engine.weights import Weights
from adjoint.methods import METHODS, Method
from adjoint.parallel.access import KINDS

pytestmark = pytest.mark.xdist_group("repository")  # one process reads all files
ROOT = Path(__file__).resolve().parent.parent

# The house from the ground up: a file imports only from entries before its own, and within its own folder.
FLOORS = [
    "errors",
    "releases",
    "settings",
    "batch",
    "memory",
    "files",
    "checkpoint",
    "kernels",
    "layers",
    "loss",
    "formats",
    "fla",
    "engine",
    "parallel",
    "methods",
    "stack",
    "hf",
    "data",
    "train",
    "plan",
    "cluster",
    "tools",
    "integrations",
    "cli",
    "__init__",
    "__main__",
]
PAGES_OF_TESTS = ("docs/squares.md",)  # made by a test
HIGHEST = 11  # levels: the longest chain of entries that import each other


@pytest.fixture(autouse=True, scope="module")
def without_garbage_collection() -> Iterator[None]:
    """Collect no garbage while files are parsed: each collection would walk over the trees of all files."""
    gc.disable()
    yield
    gc.enable()


def python_files(*folders: str) -> list[Path]:
    """Every Python file under `folders` of the repository, links not followed."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def imports_of(path: Path, *, at_import: bool = False) -> list[tuple[int, str]]:
    """(line, dotted name) of each import of a file, relative ones resolved, `from a import b` as a.b.

    With `at_import`, only those that run when the file is imported: not in functions, not for type checkers.
    """

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            typing_only = at_import and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            if not ((at_import and deferred) or typing_only):
                yield child
                yield from walk(child)

    package, imports = path.relative_to(ROOT).with_suffix("").parts[:-1], list[tuple[int, str]]()
    for node in walk(syntax_tree(path)):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *(node.module.split(".") if node.module else [])])
            imports += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return imports


def run_python(code: str, *path: Path) -> str:
    """What `code` prints in a fresh interpreter outside the repository, with `path` first on sys.path."""
    prelude = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + code], cwd="/", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["kernels", "cluster", "configs"])
def test_top_level_links(name: str) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("a source distribution has no links")
    assert os.readlink(ROOT / name) == f"adjoint/{name}"


def test_a_hugging_face_kernels_package_wins_over_the_link(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("OWNER = 'hugging face'\n")
    assert run_python("import kernels; print(kernels.OWNER)", ROOT, tmp_path).strip() == "hugging face"


def test_import_needs_torch_and_numpy_alone() -> None:
    code = """
import torch, numpy
allowed = {*sys.stdlib_module_names, *(name.partition(".")[0] for name in sys.modules), "adjoint"}
optional = '''ray triton transformers matplotlib mamba_ssm causal_conv1d liger_kernel fla mambapy pynvml yaml
    tqdm safetensors tokenizers pyarrow tensorboard psutil'''.split()
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
for name in {*adjoint.__all__} - {"wrap", "unwrap"}:
    getattr(adjoint, name)
print(adjoint.__file__)
"""
    assert Path(run_python(code, ROOT).strip()) == ROOT / "adjoint" / "__init__.py"


def test_importing_the_package_changes_nothing_outside_it() -> None:
    """Nor does it matter that gradients are off then. And the repository, first on the path, hides nothing
    that a model of transformers imports."""
    code = """
import os, signal, warnings
def outside():
    return dict(os.environ), {s: signal.getsignal(s) for s in signal.valid_signals()}, warnings.showwarning
os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/nowhere"  # torch's compiler sets this, when transformers loads it
before = outside()
import torch, adjoint
with torch.inference_mode():
    for name in adjoint.__all__:
        getattr(adjoint, name)
    model = adjoint.Stack(adjoint.StackConfig(vocab_size=5, d_model=8, n_layer=1))
assert outside() == before
model = adjoint.Stack(model.config)
ids = torch.zeros(1, 3, dtype=torch.long)
model(ids, labels=ids, method=adjoint.Exact(2)).loss.backward()
from transformers import MambaForCausalLM
"""
    pytest.importorskip("transformers")
    run_python(code, ROOT)


def test_the_package_may_be_imported_beside_a_checkout(tmp_path: Path) -> None:
    """Python would take a folder called adjoint beside a script for a namespace package of that name."""
    (tmp_path / "adjoint" / "adjoint").mkdir(parents=True)
    (tmp_path / "adjoint" / "adjoint" / "__init__.py").touch()
    assert "Exact" in run_python("import adjoint; print(adjoint.__all__)", tmp_path)


def test_type_checkers_and_editors_are_told_the_names_that_there_are() -> None:
    at_once = {"MIXERS": "layers.config", "StackConfig": "layers.config"}
    for folder, modules in (("", adjoint._MODULES), ("layers", layers._MODULES | at_once)):
        stub = ROOT / "adjoint" / folder / "__init__.pyi"
        told = {name.rpartition(".")[2]: name.rpartition(".")[0] for _, name in imports_of(stub)}
        assert told == {name: f"adjoint.{module}" for name, module in modules.items()}
    assert set(adjoint.__all__) <= set(dir(adjoint))
    with pytest.raises(AttributeError, match="no attribute 'Exacte'"):
        adjoint.Exacte  # noqa: B018


def test_help_and_version_do_not_wait_for_torch() -> None:
    for argv in ([], ["--help"], ["--version"]):
        code = f"import sys; from adjoint.cli import main; main({argv!r}); print('torch' in sys.modules)"
        assert run_python(code, ROOT).endswith("False\n"), argv


def entry_of(path: Path) -> str:
    """The file or folder directly in adjoint/ that a file belongs to."""
    return path.relative_to(ROOT / "adjoint").with_suffix("").parts[0]


@functools.cache
def module_of(name: str) -> Path | None:
    """The file of adjoint that a dotted name of an import means: a module, a package or a name inside one."""
    parts = name.split(".")
    while parts and parts[0] == "adjoint":
        base = ROOT.joinpath(*parts)
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.exists():
                return path
        parts.pop()
    return None


@functools.cache
def arrows() -> dict[Path, set[Path]]:
    """Of each file of adjoint, the files that it imports anywhere, also inside functions."""
    return {
        path: {found for _, name in imports_of(path) if (found := module_of(name)) and found != path}
        for path in python_files("adjoint")
    }


def test_imports_point_down() -> None:
    wrong = []
    for path, targets in arrows().items():
        for target in targets:
            here, there = entry_of(path), entry_of(target)
            if here != there and FLOORS.index(there) >= FLOORS.index(here):
                wrong.append(f"{path.relative_to(ROOT)} imports {target.relative_to(ROOT)}")
    assert not wrong, "\n".join(wrong)


def test_no_import_goes_round_in_a_circle_and_the_house_is_low() -> None:
    files = arrows()
    graphlib.TopologicalSorter(files).prepare()  # raises with the circle
    entries: dict[str, set[str]] = {name: set() for name in FLOORS}
    for path, targets in files.items():
        entries[entry_of(path)] |= {entry_of(target) for target in targets} - {entry_of(path)}

    def height(name: str) -> int:
        return 1 + max(map(height, entries[name]), default=0)

    assert max(map(height, entries)) <= HIGHEST
    assert len(entries) <= 26


def test_modules_have_names_of_their_own() -> None:
    """But for what each tool or each operation's folder has, and for a format and a mixer of one model."""
    roles = {"__init__", "__main__", "config", "command", "report", "reference", "triton", "trial"}
    twice = {"checkpoint", "stage"}  # may only become fewer
    kernels = ROOT / "adjoint" / "kernels"
    stems = [path.stem for path in python_files("adjoint") if kernels not in path.parents[2:]]
    assert {stem for stem in stems if stems.count(stem) > 1} - roles == twice


def test_imports_are_not_hidden_from_the_interpreter() -> None:
    """Packages that may be missing, or take long to import, may be imported for type checkers alone."""
    hidden = [
        f"{path.relative_to(ROOT)}: {ast.unparse(statement)}"
        for path in python_files("adjoint")
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        if "adjoint" in ast.unparse(statement)
    ]
    assert not hidden, "\n".join(hidden)


def test_the_architecture_names_every_file_of_engine_parallel_and_hf() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (folders,) = re.findall(r"^## The folders\n(.*?)^## ", page, re.S | re.M)
    names = {name.strip("/") for name in re.findall(r"`([\w/]+)`", folders)}
    files = [path for name in ("engine", "parallel", "hf") for path in (ROOT / "adjoint" / name).glob("*.py")]
    missing = [f"{path.parent.name}/{path.name}" for path in files if path.stem not in {*names, "__init__"}]
    assert len(files) > 60 and not missing, missing


def test_pages_that_the_code_names_exist() -> None:
    """Files of docs/ in comments, docstrings, messages and set-up; links of the pages have their own test."""
    files = [
        path
        for folder in ("adjoint", "benchmarks", "scripts", "tests", "examples", ".ci")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".cpp", ".h", ".yaml", ".yml", ".sh", ".ipynb", "")
    ]
    files += [ROOT / name for name in ("Makefile", "CONTRIBUTING.md", "pyproject.toml", "train.py")]
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in re.findall(r"\bdocs/\w+\.(?:md|png|py|css)\b", path.read_text(errors="ignore"))
        if not (ROOT / name).exists() and name not in PAGES_OF_TESTS
    ]
    assert len(files) > 500 and not missing, "\n".join(missing)


def promised_tests() -> dict[str, list[tuple[str, list[str]]]]:
    """Map rows of docs/promises.md to files below tests/, each with the tests in it that the row names."""
    text = (ROOT / "docs" / "promises.md").read_text()
    rows = [line.rstrip(" |").rpartition(" | ")[2] for line in text.splitlines() if ".py`" in line]
    pattern = r"`([\w/]+\.py)`(?:: ((?:`test_\w+`(?:, )?)+))?"
    return {
        row: [(file, re.findall(r"`(test_\w+)`", names)) for file, names in re.findall(pattern, row)]
        for row in rows
    }


def test_every_promise_has_its_tests() -> None:
    rows, missing, functions = promised_tests(), [], 0
    for row, places in rows.items():
        for file, tests in places:
            path = ROOT / "tests" / file
            source = path.read_text() if path.exists() else ""
            functions += len(tests)
            missing += [f"{file}: {name}" for name in tests if f"def {name}(" not in source]
            missing += [file] if not source else []
        assert not re.sub(r"`[\w/]+\.py`|`test_\w+`|[:;, ]", "", row), row
    assert len(rows) > 40 and functions > 40 and not missing, missing


def test_every_promise_keeps_a_test_in_every_run(request: pytest.FixtureRequest) -> None:
    """Not only a slow one, but where it needs a package that the pinned environment has not."""
    if request.config.args != request.config.getini("testpaths") or request.config.getoption("keyword"):
        pytest.skip("needs all tests to be collected")
    selected = {item.nodeid.partition("[")[0] for item in request.session.items}
    files = {test.partition("::")[0] for test in selected}
    without = [
        row
        for row, places in promised_tests().items()
        if not any(
            any(f"tests/{file}::{test}" in selected for test in tests) if tests else f"tests/{file}" in files
            for file, tests in places
        )
        and not all(file.startswith("external/") or file == "hf/test_zero.py" for file, _ in places)
    ]
    assert not without, without


def test_names_and_docstrings_say_what_they_are() -> None:
    """Names like `found`, docstrings like "Those of …" and `Any` may only become fewer: scripts/style.py."""
    location = importlib.util.spec_from_file_location("style", ROOT / "scripts" / "style.py")
    assert location is not None and location.loader is not None
    style = importlib.util.module_from_spec(location)
    location.loader.exec_module(style)
    too_many = style.exceeding(
        style.counted(*style.FOLDERS, has_lines=False, parse=syntax_tree),
        json.loads(style.ALLOWED.read_text()),
    )
    assert not too_many, "\n".join(too_many)


def test_families_of_files_are_folders() -> None:
    """Three files with one prefix are a folder, or one file."""
    families: dict[tuple[Path, str], int] = {}
    for path in python_files("adjoint", "benchmarks"):
        family = path.parent, path.stem.partition("_")[0]
        families[family] = families.get(family, 0) + (path.stem != "__init__")
    many = [f"{folder}/{prefix}_*" for (folder, prefix), count in families.items() if count > 2]
    assert not many, many


def test_kernels_need_only_torch_to_be_imported() -> None:
    wrong = []
    for path in python_files("adjoint/kernels"):
        known = {"torch", "numpy", "adjoint", *sys.stdlib_module_names}
        if "triton" in (*path.parts, path.stem):  # imported by the dispatch where Triton is there
            known.add("triton")
        for line, name in imports_of(path, at_import=True):
            if name.partition(".")[0] not in known:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_constraints_pin_every_requirement_within_its_range() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {r.name: r for r in (Requirement(line) for line in lines if line and not line.startswith("#"))}
    versions = {canonicalize_name(name): str(r.specifier).removeprefix("==") for name, r in pins.items()}
    extras = {name: [*map(Requirement, lines)] for name, lines in project["optional-dependencies"].items()}

    def brought(name: str) -> Iterator[Requirement]:
        for requirement in extras[name]:
            own = requirement.name == project["name"]
            yield from (r for extra in requirement.extras for r in brought(extra)) if own else [requirement]

    for requirement in [*map(Requirement, project["dependencies"]), *brought("dev")]:
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt does not pin {requirement.name}"
        assert requirement.specifier.contains(version), f"{requirement} does not admit the pinned {version}"


def test_the_bounds_of_packages_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        *project["dependencies"],
        *(line for e in project["optional-dependencies"].values() for line in e),
    ]
    checked = set()
    for line in lines:
        name = re.match(r"[\w-]+", line)
        if name is not None and name[0] in releases.TESTED:
            bounds = releases.requirement(name[0]).removeprefix(name[0])
            assert re.sub(r"\[.*?\]|;.*", "", line).strip() == f"{name[0]}{bounds}"
            checked.add(name[0])
    assert checked == releases.TESTED.keys()


def test_one_file_imports_inner_modules_of_transformers() -> None:
    others = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files("adjoint")
        for line, name in imports_of(path)
        if re.match(r"transformers\.[a-z_]+(\.|$)", name) and path.name != "transformers_api.py"
    ]
    assert not others, "\n".join(others)


ENGINE_OBJECTS = {"step", "steps", "executor", "grid", "values", "edges", "slab", "gradients", "generators"}


def test_nobody_changes_attributes_of_the_engine_s_objects_from_outside() -> None:
    """Steps, executors and the like are told at their construction, or by a method."""
    for path in python_files("adjoint"):
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
                is_engine_object = isinstance(node.value, ast.Name) and node.value.id in ENGINE_OBJECTS
                assert not is_engine_object, f"{path}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    ("contract", "most"), [(ChunkedModel, 8), (ShardedModel, 6), (Weights, 14), (Sweep, 15), (Method, 12)]
)
def test_a_contract_stays_small(contract: type, most: int) -> None:
    """Whoever writes a model, a way to hold weights or a way to sweep has to read all of it."""
    members = {name for cls in contract.__mro__[:-1] for name in vars(cls) if not name.startswith("_")}
    assert len(members) <= most, sorted(members)


def test_methods_and_accesses_are_named_where_they_are_defined_or_picked() -> None:
    """Elsewhere their attributes are asked, not their classes. Commands and their defaults name methods."""
    methods = {method.__name__ for method in METHODS.values()} | {"Method"}
    kinds = {kind.__name__ for kind in KINDS} - {"Weights"}
    for path in python_files("adjoint"):
        text = path.read_text()
        nodes = [*ast.walk(syntax_tree(path))]
        defined = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                assert path.name == "methods.py" or not names & methods, f"{path}:{node.lineno}"
            if isinstance(node, ast.Name) and path.name != "access.py":
                assert node.id not in kinds - defined, f"{path}:{node.lineno}"
        assert "FSDPModule" not in text or path.parent.name == "parallel", path


def test_insides_of_functions_are_read_in_two_places() -> None:
    """Bytecode, closures, source text and frames of other code change without notice. Ranks compare users'
    hooks by their code (`agreement`), and only a frame tells that the Trainer evaluates (`call`)."""
    insides = r"\b(__code__|__closure__|co_\w+|cell_contents|f_locals|f_back|_getframe|currentframe)\b"
    insides += r"|\b(getsource|getclosurevars|get_referrers)\b"
    readers = {
        path.relative_to(ROOT / "adjoint").as_posix()
        for path in python_files("adjoint")
        if re.search(insides, path.read_text())
    }
    assert readers == {"hf/call.py", "parallel/agreement.py"}


def test_wheel_holds_all_sources_and_configurations_and_no_short_names(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    source = tmp_path / "source"
    package = source / "src" / "adjoint"
    shutil.copytree(ROOT / "adjoint", package, ignore=shutil.ignore_patterns("__pycache__"))
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
    kinds = (".py", ".pyi", ".cpp", ".h", ".yaml")
    assert {name for name in names if name.endswith(kinds)} == {n for n in sources if n.endswith(kinds)}
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"adjoint"}


def test_no_function_takes_more_than_seven_parameters() -> None:
    """But for kernels and what takes the places of other libraries' functions, with their signatures, and
    `Stack.forward`."""
    mirrored = ("kernels", "fla/", "stack/calls.py: forward")
    many = []
    for path in python_files("adjoint"):
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.FunctionDef):
                names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                where = f"{path.relative_to(ROOT)}: {node.name}"
                count = len(names) - (names[:1] in (["self"], ["cls"]))
                if count > 7 and not any(name in where for name in mirrored):
                    many.append(f"{where} takes {count}")
    assert not many, "\n".join(many)


def test_the_tour_is_as_long_as_it_says() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tour = text[text.index("## A tour") : text.index("## Adding")]
    files = re.findall(r"^\d+\. \[\S+\]\((\S+)\)", tour, re.MULTILINE)
    lines = sum(len((ROOT / file).read_text().splitlines()) for file in files)
    said = re.search(r"([\d,]+) lines in all", tour)
    assert said is not None and abs(int(said[1].replace(",", "")) - lines) <= 100, f"it has {lines} lines"
