"""Processes that share sequences compute what one process computes on whole ones.

Gradients of all processes add up to those of one, for every architecture, with and without activation checkpointing.
"""

import contextlib
import traceback
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forgetting_transformer.model import registry
from forgetting_transformer.ops import context
from tests.model.small_models import PRO, SMALL_FIELDS, small
from tests.processes import server
from tests.waiting import HANG

BATCH, LENGTH, VOCAB = 2, 32, 61
#: name: architecture and fields of the model. Four heads, so that four processes can share them.
MODELS = {
    "fox_pro_pruned": ("forgetting_transformer", {**PRO, "log_pruning_tolerance": -10.0}),
    "transformer_pro": ("forgetting_transformer", {**PRO, "fgate_type": "none", "use_rope": True}),
    "fox_two_key_heads": ("forgetting_transformer", {**PRO, "num_kv_heads": 2, "log_pruning_tolerance": -10.0}),
    "fox_window_one_key_head": ("forgetting_transformer", {**PRO, "num_kv_heads": 1, "window_size": 11}),
    "transformer_swa": ("transformer", {"window_size": 11}),
    "transformer_two_key_heads": ("transformer", {"num_kv_heads": 2}),
    "delta_net": ("delta_net", {"use_gate": True}),
    "gated_delta_net": ("gated_delta_net", {}),
    "kda": ("kda", {}),
    "path_fox": ("path_fox", {}),
    "hgrn2": ("hgrn2", {}),
    "mamba2_groups": ("mamba2", {"n_groups": 2}),
    "hybrid": (
        "hybrid",
        {
            "pattern": ["hgrn2", "attention"],
            "mixers": {
                "hgrn2": {"architecture": "hgrn2", "expand_ratio": 16},
                "attention": {"architecture": "forgetting_transformer", "num_heads": 4},
            },
        },
    ),
    "samba": ("samba", {"attn": {"num_heads": 4, "num_kv_heads": 2, "window_size": 11, "layers": None}}),
}
PACKED = ("fox_pro_pruned", "fox_two_key_heads", "fox_window_one_key_head", "transformer_swa", "mamba2_groups", "samba")


def test_every_architecture_is_among_them():
    assert {name for name, _ in MODELS.values()} == {*registry.model_names()}


def model_of(name: str, checkpointing: bool) -> torch.nn.Module:
    architecture, fields = MODELS[name]
    heads = {"num_heads": 4} if SMALL_FIELDS[architecture].get("num_heads") else {}
    layers = {"num_hidden_layers": 2 if architecture in ("hybrid", "samba") else 1}  # as few as have every kind
    model = small(architecture, **{**heads, **layers, **fields}).double().train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def inputs_of(packed: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    inputs = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
    if packed:  # one document begins with a process's part, others cross from part to part
        inputs["cu_seqlens"] = torch.tensor([0, 3, 8, 21, LENGTH, LENGTH + 16, LENGTH + 19, 2 * LENGTH])
    return inputs


def measure(name: str, packed: bool, checkpointing: bool, shared: context.Context | None) -> dict[str, torch.Tensor]:
    """Loss of every token here, and the gradients of their sum over all processes."""
    model, inputs = model_of(name, checkpointing), inputs_of(packed)
    part = slice(None) if shared is None else shared.part(LENGTH)
    inputs = {key: x if key == "cu_seqlens" else x[:, part] for key, x in inputs.items()}
    with context.activate(shared, None):
        loss = model(**inputs).loss
        loss.sum().backward()
    return {"loss": loss.detach(), **summed_gradients(model, shared)}


def summed_gradients(model, shared) -> dict[str, torch.Tensor]:
    """Gradients by name, of the processes that share a sequence together."""
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    if shared is not None:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
    return gradients


#: Documents are packed where models can, and most are checkpointed alone, since layers know nothing of it.
CASES = [
    *((name, name in PACKED, True) for name in MODELS),
    *((name, False, False) for name in ("fox_pro_pruned", "mamba2_groups", "samba")),
]


def _share(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "rendezvous"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=HANG))
        shared = context.Context(rank, size)
        found = {case: measure(*case, shared) for case in CASES}
        torch.save(found, folder / f"{rank}.pt")
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        raise


@pytest.mark.slow
def test_processes_that_share_sequences_compute_what_one_does(tmp_path):
    size = 4
    processes = [server.Process(target=_share, args=(tmp_path, rank, size)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANG)
    errors = "\n".join(file.read_text() for file in sorted(tmp_path.glob("*.error")))
    assert [process.exitcode for process in processes] == [0] * size, errors
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for case in parts[0]:
        whole = measure(*case, None)
        loss = torch.cat([part[case]["loss"] for part in parts], dim=1)
        torch.testing.assert_close(loss, whole.pop("loss"), rtol=0, atol=1e-6, msg=lambda m, c=case: f"{c}: {m}")
        assert whole.keys() == parts[0][case].keys() - {"loss"}
        for key, gradient in whole.items():
            error = (parts[0][case][key] - gradient).norm() / gradient.norm().clamp(min=1e-12)
            assert error < 1e-5, (case, key, error)


def test_heads_are_dealt_out_by_how_far_their_gates_reach(monkeypatch):
    monkeypatch.setattr(context, "_gather", lambda x: x.expand(2, -1))
    log_fgate = -torch.tensor([0.5, 0.001, 0.1, 0.0, 0.01, 0.02]).expand(1, 2**19, 6)
    with pretended(2):
        order = context.even_order(log_fgate)
        first, second = order.heads[:3].tolist(), order.heads[3:].tolist()
        # The fourth head reaches over the whole sequence, more than all others together: it gets the shortest.
        assert sorted(first) == [0, 2, 3] and sorted(second) == [1, 4, 5]
        assert order.heads[order.places].tolist() == list(range(6))
        assert order.heads.tolist() != order.places.tolist(), "only one of them is the right one then"
        assert context.own_heads(torch.arange(6), order).tolist() == second
        # A threshold a thousand times as far lets the third head reach as far as the fourth, which it was with before.
        far = context.even_order(log_fgate, -torch.tensor([40.0, 40, 100_000, 40, 40, 40]))
        assert len({2, 3} & set(far.heads.tolist()[:3])) == 1
        # In documents of 128 tokens all but the first head reach over everything: it is the only one with less work.
        packed = context.even_order(log_fgate, cu_seqlens=torch.arange(0, 2**20 + 1, 128))
        assert sorted(packed.heads.tolist()) == list(range(6)) and packed.heads.tolist() != order.heads.tolist()
    assert context.even_order(log_fgate) is None
    with pretended(4), pytest.raises(ValueError, match="6 heads cannot be shared equally by 4 processes"):
        context.even_order(log_fgate)


@contextlib.contextmanager
def pretended(size: int = 3):
    """As if this process shared sequences; what needs the others would fail."""
    with context.activate(context.Context(1, size), None):
        yield


def test_logits_of_a_part_need_no_argument(monkeypatch):
    """No cache is kept where sequences are shared, unless one is asked for."""
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda received, sent, group: received.copy_(sent))
    ids = torch.zeros(1, 8, dtype=torch.long)
    with context.activate(context.Context(0, 1), None):
        assert small("hgrn2")(input_ids=ids).logits.shape == (1, 8, 61)


def test_what_cannot_be_shared_is_refused_by_name():
    model, ids = small("transformer"), torch.zeros(1, 8, dtype=torch.long)
    with (
        pretended(),
        pytest.raises(ValueError, match=r"3 processes cannot share sequences: ForgettingAtt.* has 2 heads"),
    ):
        model(input_ids=ids, labels=ids)
    with (
        pretended(2),
        pytest.raises(ValueError, match="which processes that share sequences do not take"),
    ):
        model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))
    with (
        pretended(2),
        pytest.raises(ValueError, match=r"config\.loss is 'causal_lm', whose shift loses the first label"),
    ):
        small("transformer", loss="causal_lm")(input_ids=ids, labels=ids)
    reasons = small("mamba2").whole_sequence_mixers
    assert reasons(2, 5) == ["Mamba2Mixer needs 3 tokens of the part before, and parts have 2"]
    assert reasons(2, 6) == reasons(2) == reasons(1, 2) == []
    with pretended(), pytest.raises(ValueError, match="each process has 2 tokens of a sequence and needs 3"):
        context.before(torch.zeros(1, 2, 4), 3)
    with pytest.raises(ValueError, match="sequences of 8 tokens have no equal parts for 3 processes"):
        context.Context(0, 3).part(8)
