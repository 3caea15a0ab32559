"""Packed documents: the tokens of a corpus in its order, and where the texts in each row begin."""

import numpy as np
import pytest
import torch

from forgetting_transformer.data.corpus import model_inputs
from forgetting_transformer.data.packed import cu_seqlens_of, lengths_of
from tests.data.corpus_helpers import module, write_array
from tests.data.test_mixture import mixture

BOS, EOS = 0, 1
SIZES = {"train_batch_len": 16, "eval_batch_len": 16}


def test_the_model_gets_the_boundaries_of_some_rows_as_one_sequence():
    input_ids = torch.tensor([[BOS, 5, BOS, 6], [7, 8, 9, 4], [BOS, BOS, 3, 2]])
    batch = {"input_ids": input_ids, "labels": input_ids, "cu_seqlens": cu_seqlens_of(input_ids, BOS)}
    assert batch["cu_seqlens"].tolist() == [[0, 2, 4, 4, 4], [0, 4, 4, 4, 4], [0, 1, 4, 4, 4]]
    inputs = model_inputs(batch, slice(1, 3))
    assert inputs["cu_seqlens"].tolist() == [0, 4, 4, 4, 4, 4, 5, 8, 8, 8]
    assert torch.equal(inputs["labels"], input_ids[1:])
    assert set(model_inputs({"input_ids": input_ids, "labels": input_ids})) == {"input_ids", "labels"}
    assert lengths_of(batch["cu_seqlens"]) == pytest.approx({1: 1 / 12, 2: 4 / 12, 3: 3 / 12, 4: 4 / 12})


def four_rows(folder, eos: int, begin: tuple[int, ...] = ()) -> None:
    """A corpus whose four rows hold the same six texts, one after another: two begin inside of a row."""
    texts = [[*begin, *range(5 + n, 5 + n + length), eos] for n, length in enumerate((15, 7, 7, 7, 7, 15))]
    stream = np.concatenate([*texts, begin]).astype(np.uint16)
    stream = np.concatenate([stream, np.full(-len(stream) % 16, 3, dtype=np.uint16)])
    for split in ("train", "heldout"):
        write_array(folder / f"{split}.zarr", stream.reshape(-1, 16), chunks=(2, 8))
    (folder / "manifest.json").write_text(f'{{"vocab_size": 1000, "bos_token_id": {BOS}, "eos_token_id": {eos}}}')


def test_documents_begin_at_the_same_places_whether_bos_and_eos_are_one_token_or_two(tmp_path):
    four_rows(tmp_path / "one", eos=BOS)
    four_rows(tmp_path / "two", eos=EOS)
    options = SIZES | {"vocab_size": None, "bos_token_id": None}
    one, two = (module(tmp_path, dataset=name, packed=True, **options) for name in ("one", "two"))
    plain = module(tmp_path, dataset="one", **options)
    mixed = mixture(tmp_path, {"two": 1}, **options | {"packed": True, "train_batch_size": 4})
    assert (two.vocabulary.eos_token_id, one.vocabulary.eos_token_id) == (EOS, BOS)
    assert one.train_info() == plain.train_info() and one.eval_info() == plain.eval_info()
    [expected], [stored] = one.train_loader(0, 1, 0, 1), plain.train_loader(0, 1, 0, 1)
    assert all(torch.equal(expected[key], stored[key]) for key in stored), "the tokens are those of the corpus"
    for loader in (two.train_loader(0, 1, 0, 1), mixed.train_loader(0, 1, 0, 1)):
        [batch] = loader
        assert torch.equal(batch["cu_seqlens"], expected["cu_seqlens"])
        assert ((batch["cu_seqlens"] > 0) & (batch["cu_seqlens"] < 16)).sum() == 2
        assert torch.equal(batch["input_ids"], expected["input_ids"]), "a text begins with BOS, as a prompt does"
        assert torch.equal(batch["labels"] == EOS, expected["labels"] == BOS), "and ends with EOS"
    for ours, theirs in zip(two.eval_loader(0, 1), one.eval_loader(0, 1), strict=True):
        assert torch.equal(ours["cu_seqlens"], theirs["cu_seqlens"])
    assert plain.train_lengths() == {16: 1.0}
    assert two.train_lengths() == mixed.train_lengths() == one.train_lengths() == {8: 0.5, 16: 0.5}


def test_an_array_with_bos_before_each_text_and_eos_behind_it_has_one_boundary_between_two(tmp_path):
    four_rows(tmp_path / "longcrawl64", eos=EOS, begin=(BOS,))
    options = SIZES | {"vocab_size": None, "bos_token_id": None}
    data, plain = module(tmp_path, packed=True, **options), module(tmp_path, **options)
    for batch, stored in zip(data.eval_loader(0, 1), plain.eval_loader(0, 1), strict=True):
        assert torch.equal(batch["input_ids"], stored["input_ids"])
        for ids, bounds in zip(batch["input_ids"].tolist(), batch["cu_seqlens"].tolist(), strict=True):
            assert [bound for bound in bounds if 0 < bound < 16] == [n for n in range(1, 16) if ids[n] == BOS]
