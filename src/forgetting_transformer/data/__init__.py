"""Data: the arrays on disk, the order in which training reads them, and the loaders that prefetch it.

`prepare/` turns text into such arrays, `tools/` fetches and verifies them. Nothing here imports a
model or the training loop.
"""

from forgetting_transformer.data.corpus import DataInfo
from forgetting_transformer.data.longcrawl64 import LongCrawl64DataModule
from forgetting_transformer.data.order import ReadingOrder
from forgetting_transformer.data.token_array import DataError, TokenArray

__all__ = ["DataError", "DataInfo", "LongCrawl64DataModule", "ReadingOrder", "TokenArray"]
