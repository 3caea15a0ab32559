"""On CUDA: single tokens from a CUDA graph against the same tokens without one."""

import warnings

import pytest
import torch

from forgetting_transformer.model.generation.graph import DecodingGraph
from tests.model import test_decoding_graph as on_cpu
from tests.model.small_models import PRO, WINDOWS, small


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Tokens at which a graph is recorded. No warning may say that there is none."""
    record, lengths = DecodingGraph._record, []

    def counting(graph, model, cache):
        lengths.append(cache.get_seq_length())
        return record(graph, model, cache)

    monkeypatch.setattr(DecodingGraph, "_record", counting)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="no CUDA graph is used")
        yield lengths


def decode(*arguments, **options):
    return on_cpu.decode(*arguments, **options).float()


def random_ids(batch: int, length: int):
    return on_cpu.random_ids(batch, length).cuda()


ROUNDED = [
    ("forgetting_transformer", {**PRO, "log_pruning_tolerance": -10.0}),
    ("transformer", {"num_kv_heads": 1}),
    ("hybrid", WINDOWS),
]


@pytest.mark.parametrize(
    "name, fields, kind",
    [
        *((*case, "float32") for case in on_cpu.CASES),
        *((*case, kind) for case in ROUNDED for kind in ("bfloat16", "autocast")),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x) or "default",
)
def test_a_graph_gives_the_logits_of_calls_without_one(name, fields, kind, recorded):
    model, ids = small(name, **fields).cuda(), random_ids(2, 150)
    if kind == "bfloat16":
        model.bfloat16()
    with torch.autocast("cuda", torch.bfloat16, enabled=kind == "autocast"):
        want = decode(model, ids, model.new_cache())
        assert not recorded
        got = decode(model, ids, model.new_cache(cuda_graph=True))
    assert recorded
    assert (got - want).norm() <= (1e-4 if kind == "float32" else 3e-2) * want.norm()


def test_memory_of_autocast_is_not_read_after_it_is_freed(recorded):
    """Casts of weights that autocast keeps are gone when its context ends."""
    model, ids = small("forgetting_transformer", **PRO).cuda(), random_ids(1, 60)
    cache, parts = model.new_cache(cuda_graph=True), []
    for start, stop in [(0, 20), *((i, i + 1) for i in range(20, 60))]:
        with torch.autocast("cuda", torch.bfloat16):
            parts.append(model(input_ids=ids[:, start:stop], past_key_values=cache).logits.float())
        torch.full((1 << 20,), torch.nan, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        want = model(input_ids=ids, use_cache=False).logits.float()
    assert len(recorded) == 1
    assert (torch.cat(parts, 1) - want).norm() <= 3e-2 * want.norm()


def test_where_recording_fails_the_stream_and_random_numbers_are_restored(recorded):
    class Waits(torch.nn.Linear):
        def forward(self, x):
            assert x.sum().item() is not None
            return super().forward(x)

    model, ids = small("forgetting_transformer").cuda(), random_ids(1, 60)
    want = decode(model, ids, model.new_cache())
    mixer = model.decoder.layers[0].sequence_mixer
    mixer.o_proj.__class__ = Waits
    before = torch.cuda.current_stream()
    state = torch.cuda.get_rng_state()
    with pytest.warns(RuntimeWarning, match="cannot be recorded"):
        warnings.filterwarnings("always", message="no CUDA graph is used")
        got = decode(model, ids, model.new_cache(cuda_graph=True))
    assert torch.cuda.current_stream() == before
    assert (got - want).norm() <= 1e-4 * want.norm()
    drawn = torch.rand(100, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(100, device="cuda"), drawn)
    torch.cuda.empty_cache()
