"""The corpora of this package: what `datamodule.name` may be, and the keys of each. Reading this loads no PyTorch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from forgetting_transformer.plugins import CORPORA
from forgetting_transformer.ranges import POSITIVE, one_of, within
from forgetting_transformer.training.config import DataModuleConfig

if TYPE_CHECKING:
    from forgetting_transformer.data import LongCrawl64DataModule
    from forgetting_transformer.data.vocabulary import Vocabulary


@dataclass
class LongCrawl64Config(DataModuleConfig):
    """Keys of data.LongCrawl64DataModule, which documents them."""

    missing_chunks: str = one_of("error", "skip")
    cache_dir: str | None = None
    cache_gb: float = within(POSITIVE, 20.0)


@CORPORA.register("longcrawl64", config=LongCrawl64Config)
def longcrawl64(
    data_dir: str, config: LongCrawl64Config, recorded: "Vocabulary | None" = None
) -> "LongCrawl64DataModule":
    """Documents of one length in Zarr arrays, from scripts/prepare_data.py or LongCrawl64 itself."""
    from forgetting_transformer.data import LongCrawl64DataModule

    arguments = {key: value for key, value in vars(config).items() if key != "name"}
    return LongCrawl64DataModule(data_dir, **arguments, recorded=recorded)
