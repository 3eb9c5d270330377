"""Things measured in processes of their own, point by point: by benchmarks and by `adjoint compare`."""
