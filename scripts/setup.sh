#!/usr/bin/env bash
# scripts/setup.sh VENV EXTRAS [PIN…]: make VENV and install this repository into it with EXTRAS ("" or "dev" or "dev,cluster").
# A PIN such as torch==2.15.0 stands in the place of its line of constraints.txt.
#
# Where there is no NVIDIA GPU the CPU build of torch is asked for by its local version (2.13.0+cpu). Plain
# "torch" from PyPI is the CUDA build on Linux: gigabytes that such a machine cannot use, so without a CPU build
# this stops and says what to do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$1
extras=${2:-}
say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then  # none yet, or one whose making was interrupted
    python=
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if usable "$candidate"; then python=$candidate; break; fi
    done
    [[ -n $python ]] || die "need Python 3.11, 3.12 or 3.13 with its venv module (on Debian and Ubuntu: apt install" \
        "python3-venv); found none as ${PYTHON:-python3 or python3.11 to python3.13}. Name one with: make PYTHON=/path/to/python"
    say "making $venv with $("$python" --version)"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install -q --upgrade pip || true  # the one Python comes with takes twice as long
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check install --no-compile)  # modules are, as they are imported
[[ -t 1 ]] || pip+=(-q)  # a progress bar for people, a few lines for logs
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
cp constraints.txt "$pins"
for pin in "${@:3}"; do
    sed -i "/^${pin%%==*}==/d" "$pins"
    printf '%s\n' "$pin" >>"$pins"
done
torch=$(sed -nE 's/^torch==([0-9.]+).*/\1/p' "$pins")

has_gpu() {  # all of what nvidia-smi says is read: it would die of a pipe that is closed at the first GPU
    local listed
    listed=$(nvidia-smi -L 2>/dev/null) && [[ $listed == *"GPU "[0-9]* ]]
}

if [[ $(uname -s) == Linux ]] && ! has_gpu; then
    # a build of that version that is there already stays, CUDA's too
    if ! "$venv/bin/python" -c "from importlib.metadata import version as v; assert v('torch').split('+')[0] == '$torch'" 2>/dev/null; then
        say "no NVIDIA GPU here: installing torch $torch for the CPU (about 200 MB)"
        # First from wherever pip is set up to look (a local wheel, a mirror), then from PyTorch's own index.
        "${pip[@]}" --no-deps "torch==$torch+cpu" 2>/dev/null ||
            "${pip[@]}" --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==$torch+cpu" 2>/dev/null ||
            die "neither pip's sources nor https://download.pytorch.org/whl/cpu have torch $torch+cpu for this Python;" \
                "put its wheel into a folder named by PIP_FIND_LINKS, or take the CUDA build, gigabytes larger, with:" \
                "$venv/bin/python -m pip install torch==$torch"
    fi
fi

say "installing adjoint${extras:+[$extras]} and the pinned versions of constraints.txt"
"${pip[@]}" -c "$pins" -e ".${extras:+[$extras]}"
say "ready: $("$venv/bin/python" -c 'import sys, torch; print("Python", sys.version.split()[0], "· torch", torch.__version__)')"
if has_gpu && ! "$venv/bin/python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    say "this PyTorch cannot use the NVIDIA GPU here: torch $torch is built for CUDA 13, whose driver is 580 or later. With an" \
        "older one install it from another index: $venv/bin/python -m pip install torch==$torch --index-url" \
        "https://download.pytorch.org/whl/cu126" >&2
fi
