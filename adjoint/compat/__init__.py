"""Other libraries' models in and out. Nothing here is imported unless asked for."""
