"""How far a run is."""

import dataclasses


@dataclasses.dataclass
class Counters:
    """What a run has done so far, over all ranks and restarts. Times in seconds."""

    token_count: int = 0
    batch_count: int = 0
    flop_count: int = 0
    total_time: float = 0.0
    update_time: float = 0.0

    def as_floats(self) -> dict[str, float]:
        return {name: float(value) for name, value in vars(self).items()}
