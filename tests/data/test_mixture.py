"""A mixture: the sequences of every step are a function of its number, each corpus in its order and proportion."""

import itertools
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from forgetting_transformer.data import DataError
from forgetting_transformer.data.mixture import Interleaving, MixtureDataModule
from tests.data.corpus_helpers import OPTIONS, write_array

#: Rows of each corpus; the first token of a document says which corpus and document it is of, the others count on.
SIZES = {"code": 30, "prose": 12, "web": 20}


@pytest.fixture
def corpora(tmp_path):
    for number, (name, documents) in enumerate(SIZES.items()):
        first = 100 * (number + 1) + np.arange(documents)[:, None]
        tokens = (np.broadcast_to(first, (documents, 64)) + 0).astype(np.uint16)
        tokens[:, 1::2] = np.arange(1, 64, 2)
        for split in ("train", "heldout"):
            write_array(tmp_path / name / f"{split}.zarr", tokens, chunks=(8, 16))
    return tmp_path


def mixture(data_dir, parts, **changes) -> MixtureDataModule:
    sizes = {"train_batch_len": 16, "train_batch_size": 6, "eval_batch_len": 16, "eval_local_batch_size": 4}
    return MixtureDataModule(str(data_dir), parts=parts, **OPTIONS | sizes | changes)


def labels(data: MixtureDataModule, first: int, last: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
    return np.stack([batch["labels"].numpy() for batch in data.train_loader(first, last, rank, world_size)])


@pytest.mark.parametrize("weights", [[1], [0.7, 0.3], [5, 2, 1]])
def test_every_corpus_gets_its_share_of_any_stretch(weights):
    order = Interleaving(weights)
    exact = np.array(weights) / np.sum(weights)
    places = [order.locate(sequence) for sequence in range(3000)]
    given = np.cumsum([np.arange(len(weights)) == corpus for corpus, _ in places], axis=0)
    assert [number for _, number in places] == [int(given[n, corpus]) - 1 for n, (corpus, _) in enumerate(places)]
    assert np.abs(given - exact * np.arange(1, 3001)[:, None]).max() <= 1.5
    for corpus, available in itertools.product(range(len(weights)), (1, 5, 17)):
        most = order.sequences_before(corpus, available)
        assert given[most - 1, corpus] <= available < given[most, corpus]


def test_sequences_are_those_of_the_corpora_in_their_order_and_places_say_where(corpora):
    data = mixture(corpora, {"prose": 1, "code": 2})
    found = {"code": [], "prose": []}
    for batch, rows in enumerate(labels(data, 0, 7)):
        places = data.locate(batch)
        for row, tokens in enumerate(rows):
            name = "code" if tokens[0] < 200 else "prose"
            found[name].append(tokens)
            assert places[row].startswith(f"{name}: document {tokens[0] % 100}, tokens ")
        assert sum(place.startswith("code") for place in places) == 4
    for name, sequences in found.items():
        part = next(corpus for corpus in data.corpora if corpus.dataset == name).array("train")
        for n, tokens in enumerate(sequences):
            column, document = divmod(n, SIZES[name])
            assert np.array_equal(tokens, part.read(document, document + 1, column * 16, column * 16 + 16)[0])
    assert len(found["prose"]) > SIZES["prose"], "the second column was reached"


@pytest.mark.parametrize(("world_size", "workers"), [(2, 0), (3, 2)])
def test_ranks_slice_last_and_any_step_can_be_read_first(corpora, world_size, workers):
    parts = {"code": 5, "prose": 2, "web": 3}
    whole = labels(mixture(corpora, parts), 0, 6)
    data = mixture(corpora, parts, train_num_workers=workers)
    shares = [labels(data, 3, 6, rank, world_size) for rank in range(world_size)]
    assert np.array_equal(np.concatenate(shares, axis=1), whole[3:6])


def test_the_fingerprint_covers_the_corpora_and_their_weights(corpora):
    fingerprints = [
        mixture(corpora, parts).train_info().fingerprint
        for parts in ({"code": 3, "web": 1}, {"code": 1, "web": 3}, {"code": 3, "prose": 1}, {"code": 3})
    ]
    assert len({*fingerprints}) == 4
    assert mixture(corpora, {"web": 0.25, "code": 0.75}).train_info().fingerprint == fingerprints[0]


def test_the_budget_ends_with_the_first_corpus_that_is_read(corpora):
    data = mixture(corpora, {"code": 1, "prose": 1})
    info = data.train_info()
    # prose has 12 documents of 4 sequences, and gives every second one.
    assert info.total_batches == 2 * 12 * 4 // 6 and info.total_tokens == 16 * 16 * 6
    labels(data, info.total_batches - 1, info.total_batches)
    with pytest.raises(IndexError, match=r"datamodule\.repeat=true"):
        labels(data, info.total_batches, info.total_batches + 1)
    again = mixture(corpora, {"code": 1, "prose": 1}, repeat=True)
    assert labels(again, info.total_batches, info.total_batches + 3).shape == (3, 6, 16)


def test_a_batch_goes_on_in_the_next_column_of_a_part(corpora):
    data = mixture(corpora, {"code": 1, "prose": 5})
    # Sequences 10 to 14 of prose: its last two of 12 documents, and in the next column the first three.
    (batch,) = labels(data, 2, 3)
    assert sorted(batch[:, 0].tolist())[-5:] == [200, 201, 202, 210, 211]


def test_held_out_tokens_are_shared_out_by_weight_and_counted_once(corpora):
    data = mixture(corpora, {"code": 3, "prose": 1}, eval_tokens=64 * 12)
    assert data.eval_info().total_tokens == 64 * 12
    for world_size in (1, 2):
        seen = []
        for rank in range(world_size):
            for batch in data.eval_loader(rank, world_size):
                seen += batch["labels"][batch["weight"] == 1][:, 0].tolist()
        # Document by document and column by column: 9 documents of code, 3 of prose, each in 4 sequences.
        assert sorted(seen) == sorted([100 + n for n in range(9)] * 4 + [200 + n for n in range(3)] * 4)


def test_parts_that_cannot_be_mixed_are_refused_in_a_line(corpora):
    with pytest.raises(DataError, match=r"20,000 sequences; use weights of fewer digits"):
        mixture(corpora, {"code": 0.12345, "web": 0.87655})
    with pytest.raises(DataError, match=r"no token array at .*/wbe/train\.zarr"):
        mixture(corpora, {"code": 1, "wbe": 1}).train_info()


def test_corpora_of_different_tokenizers_of_one_size_are_refused(corpora):
    for name, order in (("prose", "ab"), ("web", "ba")):  # and none for code
        (corpora / name / "tokenizer").mkdir()
        model = models.WordLevel({token: id for id, token in enumerate(order)}, unk_token="a")
        Tokenizer(model).save(str(corpora / name / "tokenizer/tokenizer.json"))
    with pytest.raises(
        DataError, match=r"web was made with another tokenizer than prose: id 0 is 'b' there and 'a' in"
    ):
        mixture(corpora, {"code": 1, "prose": 1, "web": 1}).check_tokenizers()
    shutil.copy(corpora / "prose/tokenizer/tokenizer.json", corpora / "web/tokenizer/tokenizer.json")
    mixture(corpora, {"code": 1, "prose": 1, "web": 1}).check_tokenizers()


def test_corpora_of_different_vocabularies_are_refused(corpora):
    (corpora / "code" / "manifest.json").write_text('{"vocab_size": 1000, "bos_token_id": 0}')
    (corpora / "web" / "manifest.json").write_text('{"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 1}')
    with pytest.raises(
        DataError,
        match=r"\(code: .*size=1000, bos_token_id=0, eos_token_id=0\), web: .*bos_token_id=0, eos_token_id=1\)\)",
    ):
        mixture(corpora, {"code": 1, "web": 1}, vocab_size=None, bos_token_id=None).train_info()
    info = mixture(corpora, {"web": 1}, vocab_size=None, bos_token_id=None).train_info()
    assert (info.bos_token_id, info.eos_token_id) == (0, 1)
