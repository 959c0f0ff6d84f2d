"""Custom operators: one operator per kernel that a device would run, with fake kernel and FLOPs."""
