"""How a network is laid out over devices: one file per kind of parallelism."""
