"""The corpora of this package: values of `datamodule.name`, and the keys of each. Reading this loads no PyTorch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from forgetting_transformer.plugins import CORPORA
from forgetting_transformer.training.config import DataModuleConfig, Positive, Text

if TYPE_CHECKING:
    from forgetting_transformer.data.corpus import Corpus


@dataclass(kw_only=True)
class LongCrawl64Config(DataModuleConfig):
    """Keys that configs/datamodule/longcrawl64.yaml explains."""

    missing_chunks: Literal["error", "skip"] = "error"
    cache_dir: Text | None = None
    cache_gb: Positive = 20.0


@CORPORA.register("longcrawl64", config=LongCrawl64Config)
def longcrawl64(data_dir: str, config: LongCrawl64Config, packed: bool = False) -> "Corpus":
    """Documents of one length in Zarr arrays, from scripts/prepare_data.py or LongCrawl64 itself."""
    from forgetting_transformer.data import LongCrawl64DataModule

    return LongCrawl64DataModule(data_dir, **_arguments(config), packed=packed)


@CORPORA.register("packed", config=LongCrawl64Config)
def packed(data_dir: str, config: LongCrawl64Config) -> "Corpus":
    """The same tokens in the same order, with the texts in a row kept apart."""
    return longcrawl64(data_dir, config, packed=True)


@dataclass(kw_only=True)
class MixtureConfig(LongCrawl64Config):
    """Keys that configs/datamodule/mixture.yaml explains."""

    #: Overwritten with the joined names of the parts, so that a recipe's dataset does not name the mixture.
    dataset: str = "mixture"
    #: Folder names of corpora in `data_dir`, and how many sequences each gives in proportion to the others.
    parts: Annotated[dict[str, Positive], Field(min_length=1)]
    #: Whether texts in a row are kept apart, as with `packed`.
    packed: bool = False

    def __post_init__(self) -> None:
        self.dataset = "+".join(sorted(self.parts))


@CORPORA.register("mixture", config=MixtureConfig)
def mixture(data_dir: str, config: MixtureConfig) -> "Corpus":
    """Several corpora of one tokenizer, in proportion to weights."""
    from forgetting_transformer.data.mixture import MixtureDataModule

    return MixtureDataModule(data_dir, **_arguments(config))


def _arguments(config: LongCrawl64Config) -> dict[str, Any]:
    return {key: value for key, value in vars(config).items() if key != "name"}
