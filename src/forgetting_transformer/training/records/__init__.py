"""Files that a run writes beside its checkpoints: folder, descriptions, logs, metrics, losses by position."""
