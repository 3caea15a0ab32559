"""Several processes: their start, the data of each, and sharding among them."""
