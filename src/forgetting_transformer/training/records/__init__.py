"""Files that a run writes beside its checkpoints: its folder, logs, metrics, losses by position."""
