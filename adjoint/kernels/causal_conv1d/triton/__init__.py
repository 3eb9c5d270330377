"""The causal convolution in Triton: `launch` has the functions, and the kernels of short filters."""
