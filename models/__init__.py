"""The networks: pure torch.nn, one file per family, shared layers beside them."""
