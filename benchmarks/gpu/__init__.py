"""What a GPU's first half hour has to say (see `command`)."""
