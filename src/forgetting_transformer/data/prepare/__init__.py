"""Turn text into token arrays in LongCrawl64's format: `train.zarr`, `heldout.zarr`, `tokenizer/`, `manifest.json`.

The modules in the order in which a text passes them:

    settings.py     what a corpus is made of
    sources.py      files and data sets -> texts -> pieces, in path order, duplicates dropped
    near_duplicates.py   which texts resemble an earlier one
    tokenizers.py   train, load or build the tokenizer; text -> token ids
    shards.py       work on shards of text, in parallel, of which a killed run keeps what is done
    stream.py       pieces -> one long token stream on disk
    layout.py       token stream -> which tokens make which row of which array
    writing.py      rows -> Zarr chunks, in parallel, restartable; reading back
    output.py       the folder of the corpus, and how a new one gets there
    pipeline.py     the order of all this, the manifest, what is done after a kill
"""

from forgetting_transformer.data.prepare.pipeline import prepare_corpus
from forgetting_transformer.data.prepare.settings import CorpusSettings

__all__ = ["CorpusSettings", "prepare_corpus"]
