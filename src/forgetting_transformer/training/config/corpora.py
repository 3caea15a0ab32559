"""The corpora of this package: what `datamodule.name` may be, and the keys of each. Reading this loads no PyTorch."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from forgetting_transformer.plugins import CORPORA
from forgetting_transformer.ranges import POSITIVE, one_of, within
from forgetting_transformer.training.config import DataModuleConfig

if TYPE_CHECKING:
    from forgetting_transformer.data.corpus import Corpus


@dataclass
class LongCrawl64Config(DataModuleConfig):
    """Keys of data.LongCrawl64DataModule, which documents them."""

    missing_chunks: str = one_of("error", "skip")
    cache_dir: str | None = None
    cache_gb: float = within(POSITIVE, 20.0)


@CORPORA.register("longcrawl64", config=LongCrawl64Config)
def longcrawl64(data_dir: str, config: LongCrawl64Config) -> "Corpus":
    """Documents of one length in Zarr arrays, from scripts/prepare_data.py or LongCrawl64 itself."""
    from forgetting_transformer.data import LongCrawl64DataModule

    return LongCrawl64DataModule(data_dir, **_arguments(config))


@CORPORA.register("packed", config=LongCrawl64Config)
def packed(data_dir: str, config: LongCrawl64Config) -> "Corpus":
    """The same tokens in the same order, with the texts in a row kept apart."""
    from forgetting_transformer.data import LongCrawl64DataModule

    return LongCrawl64DataModule(data_dir, **_arguments(config), packed=True)


@dataclass
class MixtureConfig(LongCrawl64Config):
    """Keys of data.mixture.MixtureDataModule, which documents them."""

    #: Overwritten with the joined names of the parts, so that a recipe's dataset does not name the mixture.
    dataset: str = "mixture"
    #: Folder names of corpora in `data_dir`, and how many sequences each gives in proportion to the others.
    parts: dict[str, float] = field(default_factory=dict)
    #: Whether texts in a row are kept apart, as with `packed`.
    packed: bool = False

    def __post_init__(self) -> None:
        self.dataset = "+".join(sorted(self.parts)) or self.dataset

    def check(self) -> None:
        shown = ", ".join(f"{name}: {weight:g}" for name, weight in self.parts.items())
        if not self.parts or any(not (math.isfinite(weight) and weight > 0) for weight in self.parts.values()):
            raise ValueError(
                f"datamodule.parts={{{shown}}} must name the corpora in data_dir and give each a positive weight, "
                "as in datamodule.parts={code: 3, prose: 1}"
            )


@CORPORA.register("mixture", config=MixtureConfig)
def mixture(data_dir: str, config: MixtureConfig) -> "Corpus":
    """Several corpora of one tokenizer, in proportion to weights."""
    from forgetting_transformer.data.mixture import MixtureDataModule

    return MixtureDataModule(data_dir, **_arguments(config))


def _arguments(config: LongCrawl64Config) -> dict[str, Any]:
    return {key: value for key, value in vars(config).items() if key != "name"}
