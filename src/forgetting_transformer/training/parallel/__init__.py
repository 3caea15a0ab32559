"""Several processes: how they are started, what each trains on, what is sharded among them."""
