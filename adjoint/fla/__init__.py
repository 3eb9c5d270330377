"""Our operations in place of functions of flash-linear-attention (fla), whose own are for GPUs alone."""
