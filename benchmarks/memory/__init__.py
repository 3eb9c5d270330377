"""Peak memory and time a token against sequence length: `python -m benchmarks.memory` (see `command`)."""
