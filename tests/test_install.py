"""The ways to install of docs/install.md: the README's commands run in an environment made by just these
lines. Also what set-up does on machines with and without a GPU."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from tests.page_helpers import ROOT, RUNS, carry_out, make_hybrid, script, texts

README = (ROOT / "README.md").read_text()
INSTALL = (ROOT / "docs" / "install.md").read_text()
MODEL = "state-spaces/mamba-130m-hf"  # that the pages' Python names
# A model and a tokenizer of that kind, small, as a folder; run in the environment that is tried.
TINY_MODEL = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast
letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
bytewise = Tokenizer(models.BPE(letters, []))
bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bytewise.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=bytewise).save_pretrained(sys.argv[1])
config = MambaConfig(vocab_size=256, hidden_size=16, num_hidden_layers=2, state_size=4)
MambaForCausalLM(config).save_pretrained(sys.argv[1])
"""
FEW = {"TRAINING__STEPS": "2", "DATA__SEQLEN": "512"}


def ways_to_install() -> dict[str, str]:
    """The ways to install the extra hf: the line above each, and its commands."""
    lines = [line.removeprefix("    ") for line in INSTALL.splitlines() if line.startswith("    ")]
    ways: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("# "):
            ways[line[2:]] = []
        else:
            [*ways.values()][-1].append(line)
    return {title: "\n".join(commands) for title, commands in ways.items()}


def readme_extras() -> dict[str, list[str]]:
    """The headings whose commands run with these extras, from the table; those of the rows above run too."""
    found: dict[str, list[str]] = {}
    for extras, text in re.findall(r"^\| (none|`[\w,]+`) \| (.*) \|$", INSTALL, re.M):
        found[extras.strip("`").replace("none", "")] = re.findall(r"\[([^]]+)\]\(\.\./README\.md#", text)
    return found


def wanted_of_pages() -> dict[str, str]:
    """The extras that pages of docs/ tell their readers to install, by page."""
    pages = {f"docs/{page.name}": page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))}
    found = {name: re.search(r'pip install -e "\.\[([\w,]+)\]"', text) for name, text in pages.items()}
    return {name: match[1] for name, match in found.items() if match}


# Each way to install, and the parts of pages that then run.
HEADINGS = readme_extras()
WAYS = {title: (commands, HEADINGS[""] + HEADINGS["hf"]) for title, commands in ways_to_install().items()}
WAYS |= {
    f"extras: {extras or 'none'}": (f'pip install -e ".{f"[{extras}]" if extras else ""}"', headings)
    for extras, headings in HEADINGS.items()
    if extras != "hf"
}
WAYS["make train"] = ("make train", [])


def test_every_part_of_the_readme_with_commands_says_what_it_needs() -> None:
    parts = re.split(r"^## (.*)$", README, flags=re.M)
    commands = re.compile(r"^    (adjoint|python|ray) |^```python", re.M)
    with_commands = {
        head for head, text in zip(parts[1::2], parts[2::2], strict=True) if commands.search(text)
    }
    linked = {heading for headings in HEADINGS.values() for heading in headings}
    linked |= {"Several GPUs and machines"} if "README.md#several-gpus-and-machines)" in INSTALL else set()
    assert with_commands - linked == set()


def test_the_readmes_line_is_one_of_the_ways() -> None:
    (line,) = re.findall(r"^    (pip install \S+ \S+)", README, re.M)
    assert line in ways_to_install().values()
    option = re.search(r"without a GPU add (--.*)$", README, re.M)
    assert option is not None and f"{line} {option[1]}" == next(iter(ways_to_install().values()))


def test_extras_on_the_pages_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {*HEADINGS, *wanted_of_pages().values()} - {""}
    assert {extra for names in named for extra in names.split(",")} <= set(project["optional-dependencies"])


# ------------------------------------------------------------------------------------- clean environments


class Clean:
    """A checkout of its own, with an environment beside it."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.work = folder / "checkout", folder / "work"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).exists():
                (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.checkout / name, follow_symlinks=False)
        self.work.mkdir()
        shutil.copy(ROOT / "train.py", self.work)
        self.venv = self.checkout / ".venv"

    def install(self, commands: str) -> None:
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        env["PIP_RETRIES"] = "0"
        if shutil.which("nvidia-smi") is None:  # else a line without CPU in it would fetch gigabytes here
            pins = (self.checkout / "constraints.txt").read_text()
            (torch,) = re.findall(r"^torch==[\d.]+$", pins, re.M)
            build = self.checkout / "torch.txt"  # every other package is what the index has newest
            build.write_text(f"{torch}+cpu\n")
            env |= {"PIP_CONSTRAINT": str(build), "UV_CONSTRAINT": str(build)}
        env["PATH"] = f"{self.venv}/bin:{env['PATH']}"
        try:
            socket.getaddrinfo("download.pytorch.org", 443)
        except OSError:  # behind a mirror that has what PyTorch's own index has
            commands = re.sub(" --(torch-backend=auto|extra-index-url https://download[^ ]*)", "", commands)
        if commands.startswith("uv "):
            self._with_uv(env)
        elif not commands.startswith("make "):
            subprocess.run([sys.executable, "-m", "venv", self.venv], check=True)
        run = {"cwd": self.checkout, "env": env, "capture_output": True, "text": True}
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], timeout=2400, **run)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]

    def _with_uv(self, env: dict[str, str]) -> None:
        if shutil.which("uv") is None:
            tool = self.checkout / "uv"
            subprocess.run([sys.executable, "-m", "venv", tool], check=True)
            subprocess.run([tool / "bin" / "pip", "install", "-q", "uv"], check=True)
            env["PATH"] = f"{tool}/bin:{env['PATH']}"
        env["UV_FIND_LINKS"] = ",".join(os.environ.get("PIP_FIND_LINKS", "").split())

    def packages(self) -> str:
        """The distributions that are there, with their versions."""
        code = "from importlib.metadata import *; print(sorted((d.name, d.version) for d in distributions()))"
        return subprocess.check_output([self.venv / "bin" / "python", "-Ic", code], text=True)

    def run(self, commands: str, **variables: str) -> str:
        # at full length the tests of the pages run them
        for flag, size in (("--lengths", "64,128"), ("--data.seqlen", "512")):
            commands = re.sub(rf"{flag} \S+", f"{flag} {size}", commands)
        return carry_out(commands, self.work, self.venv / "bin", **variables)

    def python(self, code: str) -> str:
        (self.work / "snippet.py").write_text(code)
        return self.run("python snippet.py")


RAN: dict[str, str] = {}  # a way to install, by what it installs and what is run there


@pytest.fixture
def clean(tmp_path: Path) -> Clean:
    return Clean(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_what_the_readme_shows_runs_as_it_was_installed(way: str, clean: Clean, tmp_path: Path) -> None:
    commands, headings = WAYS[way]
    ran, began = [], time.monotonic()
    if way.startswith("make"):
        commands = f"ADJOINT_TRAINING__STEPS=2 {commands}"
    clean.install(commands)
    installed = time.monotonic() - began
    size = subprocess.run(
        ["du", "-sm", clean.venv], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    assert clean.run("adjoint doctor")
    made = f"{clean.packages()} {headings}"
    if headings and made in RAN:  # lines that differ on a machine with a GPU alone
        headings, ran = [], [f"the packages of “{RAN[made]}”, with which all below it ran"]
    texts(clean.work)
    corpus = clean.work / "corpus.jsonl"
    corpus.write_text("".join(corpus.open().readlines()[:8]))
    if any("hf" in extras or "finetune" in extras for extras in (way, commands)):
        (clean.work / "path" / "to").mkdir(parents=True)
        shutil.copytree(make_hybrid(tmp_path), clean.work / "path" / "to" / "model")
    for heading in headings:
        place = f"README.md#{heading}"
        if heading == "Your own model":
            ran.append(trains_as_printed(clean))
            wraps_as_printed(clean)
        if heading == "Train from scratch":
            (block,) = re.findall(r"```python\n(.*?)```", README.split(f"## {heading}")[1], re.S)[:1]
            clean.python(block.replace("65_536", "300"))
        if place in RUNS:
            variables, said = RUNS[place]
            assert said in clean.run(script(place), **variables)
        ran.append(heading)
    extras = way.removeprefix("extras: ").split(",")
    for page, wanted in wanted_of_pages().items():
        if page in RUNS and set(wanted.split(",")) <= set(extras):
            variables, said = RUNS[page]
            assert said in clean.run(script(page), **variables)
            ran.append(page)
    if "cluster" in extras:
        (line,) = re.findall(r"^    ray job submit .*? -- (.*)$", README, re.M)
        clean.run(line.replace("/shared", str(clean.work)).replace("auto", "2"), **FEW)
        ran.append(line)
    RAN.setdefault(made, way)
    minutes = (time.monotonic() - began) / 60
    times = f"{installed:.0f} s | {minutes:.1f} min | {size} MB"
    print(f"| {way} | {'; '.join(ran) or 'adjoint doctor'} | {times} |")


@pytest.mark.slow
def test_the_readmes_line_installs_what_its_snippet_needs(clean: Clean) -> None:
    """Run the line for machines without a GPU as it is printed, and the snippet on a small model's folder."""
    clean.install(next(iter(ways_to_install().values())))
    wraps_as_printed(clean)
    assert re.search(r"transformers +[\d.]+, tested", clean.run("adjoint doctor"))


def make_tiny(clean: Clean) -> None:
    (clean.work / "tiny.py").write_text(TINY_MODEL)
    clean.run("python tiny.py tiny")


def wraps_as_printed(clean: Clean) -> None:
    """Run the README's snippet on a small model, with fewer tokens."""
    make_tiny(clean)
    (block,) = re.findall(r"```python\n(.*?)```", README.split("## Your own model")[1], re.S)[:1]
    assert MODEL in block and "4_096" in block
    gradient = "\nprint('gradient', sum(p.grad.norm() for p in model.parameters()).isfinite().item())"
    said = clean.python(block.replace(MODEL, "tiny").replace("4_096", "1_000") + gradient)
    assert "gradient True" in said


def trains_as_printed(clean: Clean) -> str:
    """The Trainer's example, to which the README leads, with a small model and shorter rows."""
    make_tiny(clean)
    (clean.work / "book.txt").write_text("a book of few words " * 200)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "models.md").read_text(), re.S)
    assert MODEL in block and "65_536" in block
    said = clean.python(block.replace(MODEL, "tiny").replace("65_536", "1_000"))
    losses = [float(number) for number in re.findall(r"'loss': '?([\d.]+)", said)]
    assert len(losses) == 10 and losses[-1] < losses[0]
    return f"the Trainer, loss {losses[0]} to {losses[-1]}"


# ------------------------------------------------------------------------------------------------- set-up


def set_up(
    folder: Path, *, smi: str | None, torch: str = "none", has_wheel: bool = False, usable: bool = True
) -> tuple[int, str, str]:
    """Runs scripts/setup.sh with programs that only say what they are asked for.

    Args:
        smi: a script in the place of nvidia-smi. torch: the version that is installed. has_wheel: whether
            there is a CPU build. usable: whether torch finds a GPU.

    Returns:
        The exit code, stderr, and what pip was asked for.
    """
    places, venv, log = folder / "bin", folder / "venv" / "bin", folder / "asked"
    places.mkdir(parents=True)
    venv.mkdir(parents=True)
    log.write_text("")
    same = f"import sys; sys.exit({torch!r} not in sys.argv[1])"
    python = f"""#!/bin/bash
case "$*" in
    *"-m pip --version"*) ;;
    *install*+cpu*) echo "$*" >> {log}; exit {0 if has_wheel else 1} ;;
    *install*) echo "$*" >> {log} ;;
    *is_available*) exit {0 if usable else 1} ;;
    *importlib.metadata*) exec {sys.executable} -c "{same}" "$2" ;;
esac
"""
    for path, text in ((venv / "python", python), (places / "nvidia-smi", smi or "#!/bin/sh\nexit 127\n")):
        path.write_text(text)
        path.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / "setup.sh", folder / "venv", ""],
        env=os.environ | {"PATH": f"{places}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr, log.read_text()


linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyPI's torch is the CPU build")


@linux
def test_set_up_without_a_gpu_takes_the_cpu_build_or_stops(tmp_path: Path) -> None:
    code, said, asked = set_up(tmp_path / "none", smi=None)
    assert (
        code == 1 and said.count("\n") == 1 and "PIP_FIND_LINKS" in said and "-m pip install torch==" in said
    )
    assert "-e ." not in asked
    code, _, asked = set_up(tmp_path / "wheel", smi=None, has_wheel=True)
    assert code == 0 and "+cpu" in asked and "-e ." in asked
    (pinned,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    code, _, asked = set_up(tmp_path / "there", smi=None, torch=pinned)
    assert code == 0 and "+cpu" not in asked and "-e ." in asked


@linux
def test_set_up_sees_the_gpus_of_a_machine_that_has_many(tmp_path: Path) -> None:
    """A program that is stopped by a reader that has seen enough has failed, under pipefail."""
    many = '#!/bin/bash\nfor i in {0..9999}; do echo "GPU $i: NVIDIA H200 (UUID: GPU-$i)"; done\n'
    code, _, asked = set_up(tmp_path, smi=many)
    assert code == 0 and "+cpu" not in asked and "-e ." in asked


@linux
@pytest.mark.parametrize("usable", [True, False])
def test_set_up_says_where_torch_cannot_use_the_gpu(tmp_path: Path, usable: bool) -> None:
    one = '#!/bin/bash\necho "GPU 0: NVIDIA A100 (UUID: GPU-0)"\n'
    code, said, _ = set_up(tmp_path, smi=one, usable=usable)
    assert code == 0 and ("driver is 580 or later" in said and "whl/cu126" in said) is not usable
