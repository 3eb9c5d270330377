"""Train a model: ``python train.py [--config configs/NAME.yaml] [--section.key value ...]``."""

import sys

from adjoint.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
