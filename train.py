"""Train a model: ``python train.py [--config configs/NAME.yaml] [--section.key value ...]``."""

import os
import sys

# Read once, when torch loads OpenMP: idle threads sleep instead of spinning. On cores shared with other
# programs a spinning thread holds up the very thread it waits for: training is ten times slower then.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from adjoint.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
