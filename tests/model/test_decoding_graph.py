"""Single tokens as a graph: a static cache gives what a growing one gives, and whatever else happens to it.

Without a GPU what would be recorded runs again instead. `tests/gpu/test_decoding_graph_cuda.py` has the graphs.
"""

import copy
import warnings
import weakref

import pytest
import torch
from torch import Tensor

from forgetting_transformer.model import registry
from forgetting_transformer.model.decoder import DecoderForCausalLM
from forgetting_transformer.model.generation.cache import CACHE_NAME, DecoderCache
from forgetting_transformer.model.generation.graph import DecodingGraph
from tests.model.small_models import GROUPED, PRO, WINDOWS, small

PROMPT, LENGTH = 20, 150


def places_in_memory(cache: DecoderCache) -> list[tuple]:
    """Addresses and shapes of all that a static cache reads and writes."""
    tensors = [*cache.slot[:3], *([] if cache.seq_start_B is None else [cache.seq_start_B])]
    for layer in cache.layers:
        tensors += [x._buffer for x in getattr(layer, "_tensors", ())]
        tensors += [x._buffer for x in getattr(layer, "_shifts", {}).values()]
        tensors += [*getattr(layer, "states", {}).values()]
    return [(x.data_ptr(), x.shape) for x in tensors]


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    """Pretends that CPUs have graphs; lists the number of tokens at which one is recorded.

    What is replayed is run again, and must find everything where it was, and leave it there.
    """
    recorded = []

    def record(graph, model, cache):
        recorded.append(cache.get_seq_length())
        there, cache = places_in_memory(cache), weakref.proxy(cache)

        def replay():
            assert places_in_memory(cache) == there
            graph._compute(model, cache)
            assert places_in_memory(cache) == there

        return replay

    monkeypatch.setattr(DecodingGraph, "DEVICE_TYPES", ("cpu",))
    monkeypatch.setattr(DecodingGraph, "_record", record)
    with torch.no_grad():
        yield recorded


def random_ids(batch: int = 1, length: int = LENGTH) -> Tensor:
    return torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(0))


def decode(
    model: DecoderForCausalLM, ids: Tensor, cache: DecoderCache, start: int = PROMPT, mask: Tensor | None = None
) -> Tensor:
    """The logits of the tokens from `start` on, one by one behind a prompt of all before, `(B, …, V)`."""
    model(input_ids=ids[:, :start], past_key_values=cache, attention_mask=None if mask is None else mask[:, :start])
    logits = []
    for i in range(start, ids.shape[1]):
        options = {} if mask is None else {"attention_mask": mask[:, : i + 1]}
        logits.append(model(input_ids=ids[:, i : i + 1], past_key_values=cache, **options).logits)
        assert cache.get_seq_length() == i + 1
    return torch.cat(logits, 1)


STATIC = [name for name in registry.model_names() if name != "path_fox"]
CASES = [(name, {}) for name in STATIC] + [
    ("forgetting_transformer", {**PRO, "log_pruning_tolerance": -10.0}),
    ("forgetting_transformer", {**PRO, "fgate_type": "none", "use_rope": True}),
    ("transformer", {"num_kv_heads": 1, "window_size": 8}),
    ("forgetting_transformer", {**PRO, **GROUPED, "window_size": 8, "log_pruning_tolerance": -10.0}),
    ("hybrid", WINDOWS),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, fields", CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "default")
def test_a_graph_gives_the_logits_of_calls_without_one(name, fields, graphs):
    model = small(name, **fields)
    grows = name in ("hybrid", "samba") or model.new_cache().layers[0].is_croppable  # and fills its buffers on the way
    ids = random_ids(2, 90 if grows else 40)
    want = decode(model, ids, model.new_cache())
    assert not graphs
    got = decode(model, ids, model.new_cache(cuda_graph=True))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert graphs == [PROMPT + 3, 81][: 1 + grows]


PADDED = {
    "forgetting_transformer": PRO,
    "transformer": {"window_size": 8},
    "mamba2": {},
    "hgrn2": {},
    "hybrid": WINDOWS,
}


@pytest.mark.parametrize("name", PADDED)
def test_left_padding_that_goes_on_behind_the_prompt(name, graphs):
    """And a row that is padding for longer later."""
    model, ids = small(name, **PADDED[name]), random_ids(3, 60)
    mask = torch.ones_like(ids)
    mask[0, :15], mask[1, :3] = 0, 0
    want = decode(model, ids, model.new_cache(), start=8, mask=mask)
    got = decode(model, ids, model.new_cache(cuda_graph=True), start=8, mask=mask)
    assert graphs == [11] or name not in ("mamba2", "hgrn2")
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["forgetting_transformer", "transformer"])
def test_other_calls_come_between(name, graphs, monkeypatch):
    """Several tokens at once, tokens taken back, and rows of a batch moved."""
    monkeypatch.setattr(DecodingGraph, "WORTH", 0)  # records as soon as before
    model, ids = small(name, **(PRO if name == "forgetting_transformer" else {})), random_ids(2)
    results = []
    for cuda_graph in (False, True):
        cache, logits = model.new_cache(cuda_graph=cuda_graph), []

        def read(piece: Tensor, cache: DecoderCache = cache, logits: list[Tensor] = logits) -> None:
            logits.append(model(input_ids=piece, past_key_values=cache).logits[:, -1])

        for piece in ids.split([20, *[1] * 10, 5, *[1] * 10, 17, *[1] * 10, 78], dim=1)[:-1]:
            read(piece)
        cache.crop(-9)
        for i in range(6):
            read(ids[:, 100 + i : 101 + i])
        cache.reorder_cache(torch.tensor([1, 0]))
        for i in range(6):
            read(ids[:, 110 + i : 111 + i])
        cache.batch_repeat_interleave(2)
        for i in range(6):
            read(ids[:, 120 + i : 121 + i].repeat_interleave(2, 0))
        results.append((logits, cache))
    (want, without), (got, with_graph) = results
    assert len(graphs) == 6
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    for a, b in zip(without.layers, with_graph.layers, strict=True):
        torch.testing.assert_close(b.keys, a.keys, rtol=1e-4, atol=1e-5)


def decode_on(model: DecoderForCausalLM, ids: Tensor, cache: DecoderCache) -> Tensor:
    return torch.cat([model(input_ids=token, past_key_values=cache).logits for token in ids.split(1, dim=1)], 1)


@pytest.mark.parametrize("how", ["moved", "replaced", "assigned", "half a model"])
def test_weights_that_change_are_read_as_they_are(how, graphs):
    model, other, ids = small("forgetting_transformer"), small("forgetting_transformer", seed=1), random_ids(1, 60)
    want, cache = [], model.new_cache(cuda_graph=True)
    decode(model, ids[:, :30], cache)
    twin = copy.deepcopy(cache)
    if how == "moved":
        for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
            parameter.data = new.data.clone()
    elif how == "replaced":
        model.lm_head.weight = torch.nn.Parameter(other.lm_head.weight.clone())
    elif how == "assigned":
        model.load_state_dict({name: x.clone() for name, x in other.state_dict().items()}, assign=True)
    else:
        model = other
    twin.graph = None
    want, got = decode_on(model, ids[:, 30:], twin), decode_on(model, ids[:, 30:], cache)
    assert graphs == [23, 31]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_where_recording_fails_calls_go_on_without(monkeypatch):
    def fails(graph, model, cache):
        raise RuntimeError("operation not permitted when stream is capturing")

    model, ids = small("forgetting_transformer", **PRO), random_ids(1, 60)
    want = decode(model, ids, model.new_cache())
    monkeypatch.setattr(DecodingGraph, "_record", fails)
    with pytest.warns(RuntimeWarning, match="cannot be recorded .operation not permitted") as caught:
        got = decode(model, ids, model.new_cache(cuda_graph=True))
    assert len(caught) == 1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        decode(model, ids, model.new_cache(cuda_graph=True))


@pytest.mark.parametrize("how", ["gradients", "training", "hidden states", "tuple", "all keywords"])
def test_what_a_graph_cannot_do_is_done_without(how, graphs):
    model, ids = small("forgetting_transformer"), random_ids(1, 26)
    cache = model.new_cache(cuda_graph=True)
    model(input_ids=ids[:, :20], past_key_values=cache)
    options = {
        "hidden states": {"output_hidden_states": True},
        "tuple": {"return_dict": False},
        "all keywords": {"output_hidden_states": False, "logits_to_keep": 1, "use_cache": True},
    }.get(how, {})
    if how == "training":
        model.train()
    with torch.set_grad_enabled(how == "gradients"):
        outputs = [model(input_ids=token, past_key_values=cache, **options) for token in ids[:, 20:].split(1, dim=1)]
    if how == "gradients":
        assert outputs[-1].logits.requires_grad
    if how == "hidden states":
        assert len(outputs[-1].hidden_states) == 3
    logits = outputs[-1][0] if how == "tuple" else outputs[-1].logits
    torch.testing.assert_close(logits, model(input_ids=ids, use_cache=False).logits[:, -1:], rtol=1e-4, atol=1e-5)
    assert bool(graphs) == (how in ("tuple", "all keywords"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_beams"), [*((name, 1) for name in (*STATIC, "path_fox")), ("mamba2", 2)])
def test_generate_uses_graphs(name, num_beams, graphs):
    model, ids = small(name), random_ids(2, 8)
    options = {"do_sample": False, "num_beams": num_beams, "max_new_tokens": 12, "min_new_tokens": 12}
    options["pad_token_id"] = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        got = model.generate(ids, **options)
    # Beams move at every token.
    assert bool(graphs) == (name in STATIC and num_beams == 1)
    assert torch.equal(got, model.generate(ids, **{CACHE_NAME: model.new_cache()}, **options))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hooks", "compiled", "subclass", "devices"])
def test_models_that_a_graph_would_not_follow_go_without(how, graphs):
    class Marked(torch.nn.Parameter):
        pass

    model, ids = small("forgetting_transformer"), random_ids(1, PROMPT + 4)
    want = decode(model, ids, model.new_cache())
    if how == "hooks":
        model.decoder.layers[0].register_forward_hook(lambda *_: None)
    elif how == "compiled":
        model.decoder.layers[0].compile(backend="eager")
    elif how == "subclass":
        model.lm_head.weight = Marked(model.lm_head.weight.detach())
    else:
        model.decoder.register_buffer("elsewhere", torch.empty(3, device="meta"))
    # What is compiled need not be for this.
    with torch.compiler.set_stance("force_eager"):
        got = decode(model, ids, model.new_cache(cuda_graph=True))
    assert not graphs
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_mixers_that_say_nothing_run_without(graphs):
    """As those of users, whose forward may look at all of a buffer."""
    model, ids = small("transformer"), random_ids(1, 30)
    for block in model.decoder.layers:
        mixer = block.sequence_mixer
        mixer.__class__ = type("Own", (type(mixer),), {"static_cache": False})
    assert model.new_cache(cuda_graph=True).graph is None
    model.generate(ids, max_new_tokens=5, do_sample=False)
    assert not graphs
