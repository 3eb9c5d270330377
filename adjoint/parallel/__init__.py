"""Work shared between processes: FSDP2, context parallelism, keys and values over ranks, messages."""
