"""Checks of an architecture on a tiny model: does it keep what training, evaluation and generation rely on?

They are meant for an architecture from a user's own package, which no test of this repository knows, and take seconds
on a CPU. They look at a model from outside only. Whether a mixer computes what its paper says, they cannot know.

The model is in float32. Noise is added to every parameter first: a projection that starts at zero, or a gate that
starts shut, would hide what is behind it.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import dataclasses
import functools
import itertools
import json
import math
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from forgetting_transformer.model import registry
from forgetting_transformer.model.cache import CACHE_NAME
from forgetting_transformer.model.decoder import DecoderForCausalLM

#: What rounding explains, relative to the largest number compared. Built-in models stay below a tenth of it.
TOLERANCE = 1e-4
#: Standard deviation of what is added to every parameter.
NOISE = 0.1
# All sizes differ, so that no two axes can be taken for each other. The length is more than a chunk of the recurrences.
BATCH, LENGTH, PADDING, NEW_TOKENS = 3, 80, 11, 12
PROMPT = LENGTH - NEW_TOKENS
#: Tokens that are changed: near the beginning, inside, on both sides of a chunk's edge, the last.
CHANGED = (1, 17, 63, 64, LENGTH - 1)
#: How the sequence is read with a cache.
PIECES = {
    f"a prompt of {PROMPT} tokens, then one by one": [PROMPT, *[1] * NEW_TOKENS],
    "one token, then pieces of 3, 60 and 16": [1, 3, 60, 16],
}
#: Fields without which a small model of the architecture cannot be made.
_OWN_FIELDS: dict[str, dict[str, Any]] = {
    "hgrn2": {"expand_ratio": 16},
    "samba": {"attn": {"num_heads": 2, "num_kv_heads": 2, "window_size": 32, "layers": None}},
}
#: What configs/model/hybrid.yaml calls mixers that are no architectures.
_MIXERS = {
    "attention": {"architecture": "transformer", "num_heads": 2},
    "forgetting_attention": {"architecture": "forgetting_transformer", "num_heads": 2, "qk_norm": True},
    "sliding_window": {"architecture": "transformer", "num_heads": 2, "window_size": 32},
}


@dataclass(frozen=True)
class Result:
    """What came of one check.

    Attributes:
        name: of the check.
        is_ok: whether the model has passed it.
        detail: what was measured, or what is wrong, with the likely fix. One line.
        traceback: of the error that ended it, for its author; "" if it ended otherwise.
    """

    name: str
    is_ok: bool
    detail: str
    traceback: str = ""


class CheckFailed(Exception):
    """A check found something wrong; the message says what, and the likely fix."""

    def __init__(self, wrong: str, fix: str) -> None:
        super().__init__(f"{wrong}; {fix}")


#: Measures a model on tokens `(B, T)`; says what it has measured, or raises.
Check = Callable[[DecoderForCausalLM, Tensor], str]


def check_architecture(name: str, fields: Mapping[str, Any] | None = None) -> list[Result]:
    """Check the architecture that is registered under `name`; its plug-in must be loaded.

    Args:
        fields: of its configuration, in the place of those of `tiny_fields`.

    Returns:
        A result for each check, in their order. If no model can be made, for "build" alone.

    Raises:
        ValueError: no architecture has this name.
    """
    registry.get(name)
    results: list[Result] = []
    for title, check in {"build": _check_build, **CHECKS}.items():
        results.append(_run(title, check, name, fields))
        if not results[0].is_ok:
            break
    return results


def _run(title: str, check: Check, name: str, fields: Mapping[str, Any] | None) -> Result:
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            # PyTorch's and transformers' own, of ways to call them.
            warnings.simplefilter("ignore", FutureWarning)
            # Each check gets a model of its own, which it may change or break.
            model = tiny_model(name, fields)
            ids = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
            return Result(title, True, check(model, ids))
    except CheckFailed as failed:
        return Result(title, False, str(failed))
    except Exception as error:  # whatever the code that is checked may raise
        message = " ".join(str(error).split())
        return Result(title, False, f"{type(error).__name__}: {message}", traceback.format_exc())


def tiny_fields(name: str, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields of a tiny configuration of architecture `name`, for `registry.build_config`.

    hidden_size=64, num_hidden_layers=2, vocab_size=61, no special tokens, and num_heads=2 if that field has a number by
    default. A hybrid has as many blocks as its pattern if that has more than two, and its `mixers` know all registered
    architectures and the names of configs/model/hybrid.yaml.

    Args:
        fields: come in their place. Entries of a hybrid's `mixers` are merged field by field.
    """
    fields = dict(fields or {})
    tiny: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 61}
    tiny |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")) | _tiny_mixer(name)
    if name == "hybrid":
        fields.setdefault("pattern", ["gated_delta_net", "forgetting_attention"])
        # What is no list is refused by the configuration itself.
        tiny["num_hidden_layers"] = max(2, len(fields["pattern"])) if isinstance(fields["pattern"], list | tuple) else 2
        others = (other for other in registry.model_names() if other != "hybrid")
        mixers: dict[str, Any] = {other: {"architecture": other, **_tiny_mixer(other)} for other in others} | _MIXERS
        given = fields.get("mixers") or {}
        if isinstance(given, Mapping) and all(isinstance(own, Mapping) for own in given.values()):
            fields["mixers"] = mixers | {key: {**mixers.get(key, {}), **own} for key, own in given.items()}
    return tiny | fields


def _tiny_mixer(name: str) -> dict[str, Any]:
    """Those of `tiny_fields` that differ between architectures."""
    defaults = {field.name: field.default for field in dataclasses.fields(registry.get(name).config_class)}
    heads = {"num_heads": 2} if type(defaults.get("num_heads")) is int else {}
    return heads | _OWN_FIELDS.get(name, {})


def tiny_model(name: str, fields: Mapping[str, Any] | None = None) -> DecoderForCausalLM:
    """A model of `tiny_fields` in evaluation mode, the same in each call: seeded, with NOISE on every parameter.

    Raises:
        ValueError: a field has a wrong name or value; the message names it and the fix.
    """
    torch.manual_seed(0)
    model = registry.get(name).lm_class(registry.build_config(name, **tiny_fields(name, fields)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(NOISE * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model.eval()


# What checks share.


@torch.no_grad()
def _logits(model: DecoderForCausalLM, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """`(B, T, V)` of a whole sequence, without a cache."""
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


@torch.no_grad()
def _logits_in_pieces(
    model: DecoderForCausalLM, ids: Tensor, lengths: Sequence[int], mask: Tensor | None = None
) -> Tensor:
    """`(B, T, V)` of a sequence that is read piece by piece, each onto the cache of those before."""
    pieces: list[Tensor] = []
    cache, start = model.new_cache(), 0
    layers: Sequence[Any] = cache.layers
    for piece in ids.split(list(lengths), dim=1):
        # Said once: the cache remembers where sequences begin.
        piece_mask = mask[:, : piece.shape[1]] if mask is not None and start == 0 else None
        start += piece.shape[1]
        pieces.append(model(input_ids=piece, attention_mask=piece_mask, use_cache=True, **{CACHE_NAME: cache}).logits)
        for block, layer in enumerate(layers):
            if (held := layer.get_seq_length()) != start:
                raise CheckFailed(
                    f"the cache of block {block} says that it holds {held} tokens after {start} were read",
                    "forward must update the cache that it is given with all new tokens",
                )
    return torch.cat(pieces, dim=1)


def _difference(got: Tensor, want: Tensor) -> tuple[float, float]:
    """The largest absolute difference, inf for what is not a number, and what of it rounding explains."""
    difference = (got - want).abs().nan_to_num(nan=math.inf).max().item()
    return difference, TOLERANCE * want.abs().nan_to_num(nan=0, posinf=0).max().item()


def _same(got: Tensor, want: Tensor, what: str, fix: str) -> float:
    """The largest difference between two tensors `(B, T, …)`, which must be rounding.

    Raises:
        CheckFailed: "`what` by 0.5, first at token 3 …; `fix`".
    """
    difference, limit = _difference(got, want)
    if not difference <= limit:
        differs_T = ((got - want).abs() <= limit).logical_not().flatten(2).any(-1).any(0)
        first = int(differs_T.nonzero()[0])
        raise CheckFailed(f"{what} by {difference:.2g}, first at token {first} (tolerance {limit:.1g})", fix)
    return difference


def _gradients(model: DecoderForCausalLM, ids: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The mean loss in training mode, and its gradient by name of parameter, None for one that has none."""
    model.train().zero_grad()
    torch.manual_seed(2)  # for dropout, if there is any
    loss = model(input_ids=ids[:, :-1], labels=ids[:, 1:]).loss.mean()
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters() if x.requires_grad}


def _some(names: Sequence[str]) -> str:
    """The first few."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# The checks.


def _check_build(model: DecoderForCausalLM, ids: Tensor) -> str:
    mixers = [type(block.sequence_mixer).__name__ for block in model.decoder.layers]
    different = ", ".join(dict.fromkeys(mixers))
    return f"{type(model).__name__}, {len(mixers)} blocks of {different}, {model.num_parameters():,} parameters"


def _check_shapes(model: DecoderForCausalLM, ids: Tensor) -> str:
    logits = _logits(model, ids)  # the decoder looks at what mixers return
    shape, want = tuple(logits.shape), (*ids.shape, model.config.vocab_size)
    if shape != want:
        raise CheckFailed(f"logits have the shape {shape}", f"it must be (B, T, V) = {want}")
    if not logits.is_floating_point():
        raise CheckFailed(f"logits are {logits.dtype}", "they must be floating")
    if count := int((~logits.isfinite()).sum()):
        raise CheckFailed(
            f"{count:,} of {logits.numel():,} logits are not finite",
            f"look for logarithms, roots and divisions of what may be 0 or less (noise of {NOISE} was added to every "
            "parameter, which training may move as far)",
        )
    return f"logits {shape}, finite, {str(logits.dtype).removeprefix('torch.')}"


def _check_causality(model: DecoderForCausalLM, ids: Tensor) -> str:
    before, largest, reach = _logits(model, ids), 0.0, 0.0
    fix = (
        "a token may depend on itself and on tokens before it only: look for sums, means, norms, reversed scans or "
        "convolutions over all of T, and for a missing causal mask"
    )
    for token in CHANGED:
        changed = ids.clone()
        changed[:, token] = (ids[:, token] + 1) % model.config.vocab_size
        after = _logits(model, changed)
        what = f"changing token {token} changes logits before it"
        largest = max(largest, _same(after[:, :token], before[:, :token], what, fix))
        if token + 1 < LENGTH:
            reach = max(reach, _difference(after[:, token + 1 :], before[:, token + 1 :])[0])
    if reach <= TOLERANCE * before.abs().max().item():
        raise CheckFailed(
            f"changing tokens changes no later logits (by {reach:.1g})",
            "the mixer reads no earlier token, so that this check and those of the cache show nothing; check its gates "
            "and masks",
        )
    tokens = ", ".join(map(str, CHANGED))
    return f"changing token {tokens}: logits before it change by {largest:.1g}, later ones by {reach:.1g}"


def _check_rows(model: DecoderForCausalLM, ids: Tensor) -> str:
    before, largest = _logits(model, ids), 0.0
    fix = (
        "no operation may mix the first axis: look for means, norms, views and transposes over the batch, and for a "
        "mixer's forward that returns a bare tensor where (out_BTE, …) is expected"
    )
    for row in range(BATCH):
        changed = ids.clone()
        changed[row] = (ids[row] + 1) % model.config.vocab_size
        others = [other for other in range(BATCH) if other != row]
        what = f"changing sequence {row} of a batch changes others"
        largest = max(largest, _same(_logits(model, changed)[others], before[others], what, fix))
    return f"changing a sequence changes the others by {largest:.1g}"


def _check_gradients(model: DecoderForCausalLM, ids: Tensor) -> str:
    _, gradients = _gradients(model, ids)
    if unused := [name for name, grad in gradients.items() if grad is None]:
        raise CheckFailed(
            f"no gradient for {_some(unused)}",
            "forward does not use it, or detaches it; use it, remove it, or set requires_grad=False",
        )
    found = {name: grad for name, grad in gradients.items() if grad is not None}
    if wrong := [name for name, grad in found.items() if not grad.isfinite().all()]:
        raise CheckFailed(
            f"the gradient is not finite for {_some(wrong)}",
            "look for roots, norms and logarithms at 0, and for exponentials that overflow",
        )
    if zero := [name for name, grad in found.items() if not grad.any()]:
        raise CheckFailed(
            f"the gradient is zero for {_some(zero)}",
            "it has no effect on the loss: look for factors of 0, clamps and rounding",
        )
    return f"{len(gradients)} parameters have one that is finite and not zero"


def _check_cache(model: DecoderForCausalLM, ids: Tensor) -> str:
    whole, largest = _logits(model, ids), 0.0
    fix = (
        "the state that is kept must be the one after the last token, be read by the next call, and hold all that "
        "later tokens need (of a convolution or a shift its last inputs)"
    )
    for how, lengths in PIECES.items():
        what = f"logits of {how}, differ from those of all at once"
        largest = max(largest, _same(_logits_in_pieces(model, ids, lengths), whole, what, fix))
    limit = TOLERANCE * whole.abs().max().item()
    return f"read in pieces or one by one, logits differ by {largest:.1g} (tolerance {limit:.1g})"


def _check_padding(model: DecoderForCausalLM, ids: Tensor) -> str:
    ids, largest = ids[:2], 0.0
    mask = torch.ones_like(ids)
    mask[0, :PADDING] = 0
    fix = (
        "what lies in padding must not change what comes after: zero_padding(hidden_BTE, padding_BT) in a recurrence, "
        "seq_start_B in attention, and positions of which only differences count"
    )
    logits = _logits(model, ids, mask)
    for row, first in enumerate((PADDING, 0)):
        what = (
            f"logits of sequence {row} of a batch, whose sequence 0 has {PADDING} tokens of left padding, differ from "
            "those of it alone"
        )
        alone = _logits(model, ids[row : row + 1, first:])
        largest = max(largest, _same(logits[row : row + 1, first:], alone, what, fix))
    # Both are read in the same pieces, so that only padding can make a difference.
    one_by_one = [1] * NEW_TOKENS
    try:
        alone = _logits_in_pieces(model, ids[:1, PADDING:], [PROMPT - PADDING, *one_by_one])
    except Exception:  # which the check of the cache reports
        return f"the logits of a sequence alone differ by {largest:.1g}; a cache with padding was not checked"
    padded = _logits_in_pieces(model, ids, [PROMPT, *one_by_one], mask)[:1, PADDING:]
    what = "with a cache, logits of a left-padded sequence differ from those of it alone"
    largest = max(largest, _same(padded, alone, what, fix))
    return f"logits differ by {largest:.1g} from those of the sequence alone, also with a cache"


def _check_saving(model: DecoderForCausalLM, ids: Tensor) -> str:
    auto: Any = AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded, info = auto.from_pretrained(folder, output_loading_info=True, trust_remote_code=False)
    if type(loaded) is not type(model):
        raise CheckFailed(
            f"AutoModelForCausalLM makes a {type(loaded).__name__} of a saved {type(model).__name__}",
            f"choose a model_type that nothing else has; it is {model.config.model_type!r}",
        )
    config: Any = model.config
    for name in sorted(registry.fields_of(type(config))):
        old, new = getattr(config, name), getattr(loaded.config, name)
        as_json = functools.partial(json.dumps, sort_keys=True, default=str)  # which knows no tuples
        if as_json(old) != as_json(new):
            raise CheckFailed(
                f"the field {name} was {old!r} and is {new!r} after loading",
                "__post_init__ must leave as it is what it has made itself",
            )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if keys := sorted(map(str, info.get(kind, ()))):
            raise CheckFailed(
                f"saved weights do not fit the model that is loaded ({kind.replace('_', ' ')}: {_some(keys)})",
                "names and shapes of parameters must follow from the configuration alone",
            )
    old_tensors, tensors = (
        dict(itertools.chain(one.named_parameters(), one.named_buffers())) for one in (model, loaded)
    )
    if changed := [name for name, old in old_tensors.items() if not torch.equal(old, tensors[name])]:
        raise CheckFailed(
            f"{_some(changed)} has other values after loading",
            "init_own_weights must write through transformers.initialization, also into buffers with persistent=False, "
            "which are not saved",
        )
    fix = "all that forward depends on must be in the weights or the configuration"
    difference = _same(_logits(loaded.eval(), ids), _logits(model, ids), "logits of the loaded model differ", fix)
    return f"saved and loaded, it is a {type(loaded).__name__} whose logits differ by {difference:.1g}"


def _check_generate(model: DecoderForCausalLM, ids: Tensor) -> str:
    prompt = ids[:2, :NEW_TOKENS]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    generate: Any = model.generate
    tokens_BT = generate(prompt, use_cache=True, **options)
    # Two tokens may be equally likely but for rounding: each must have the highest logit, behind those before it.
    logits_BTV = _logits(model, tokens_BT[:, :-1])[:, NEW_TOKENS - 1 :]
    for row, token in itertools.product(range(2), range(NEW_TOKENS)):
        logits_V, chosen = logits_BTV[row, token], int(tokens_BT[row, NEW_TOKENS + token])
        best = int(logits_V.argmax())
        gap, limit = _difference(logits_V[chosen], logits_V[best])
        if chosen != best and gap > limit:
            raise CheckFailed(
                f"greedy token {token} is {chosen} with a cache and {best} without, whose logit is {gap:.2g} higher",
                "see the check of the cache",
            )
    return f"{NEW_TOKENS} greedy tokens are the same with a cache and without"


def _check_flops(model: DecoderForCausalLM, ids: Tensor) -> str:
    config = model.config
    for block in range(config.num_hidden_layers):
        flops = config.mixer_flops_per_token(block, LENGTH)
        if not (isinstance(flops, int | float) and math.isfinite(flops) and flops > 0):
            wrong = f"mixer_flops_per_token({block}, {LENGTH}) is {flops!r}"
            raise CheckFailed(wrong, "it must be a positive number of FLOPs")
    flops = config.flops_per_token(LENGTH)
    if not 0 < flops < math.inf:
        raise CheckFailed(f"flops_per_token({LENGTH}) is {flops!r}", "it must be positive; look at mlp_flops_per_token")
    with FlopCounterMode(display=False) as counter:
        _logits(model, ids)
    counted = counter.get_total_flops() / (BATCH * LENGTH)
    forward = config.flops_per_token(LENGTH, training=False)
    return f"{forward:,.0f} per token forward by its formula; PyTorch counts {counted:,.0f} in matrix products"


def _check_checkpointing(model: DecoderForCausalLM, ids: Tensor) -> str:
    loss, gradients = _gradients(model, ids)
    model.gradient_checkpointing_enable()
    loss_again, gradients_again = _gradients(model, ids)
    fix = "forward runs twice: it must compute the same again, and must not change parameters, buffers or attributes"
    pairs: dict[str, tuple[Tensor | None, Tensor | None]] = {"the loss": (loss_again, loss)}
    pairs |= {f"the gradient of {name}": (gradients_again[name], want) for name, want in gradients.items()}
    largest = 0.0
    for what, (got, want) in pairs.items():
        if got is None or want is None:
            if got is not want:
                raise CheckFailed(f"{what} is there only with or only without gradient checkpointing", fix)
            continue  # the check of gradients reports it
        difference, limit = _difference(got, want)
        if not difference <= limit:
            raise CheckFailed(
                f"with gradient checkpointing {what} differs by {difference:.2g} (tolerance {limit:.1g})", fix
            )
        largest = max(largest, difference)
    return f"loss and gradients differ by {largest:.1g}"


#: In the order in which they are run: the first ones explain what the later ones find.
CHECKS: dict[str, Check] = {
    "shapes": _check_shapes,
    "causality": _check_causality,
    "rows": _check_rows,
    "gradients": _check_gradients,
    "cache": _check_cache,
    "padding": _check_padding,
    "saving": _check_saving,
    "generate": _check_generate,
    "flops": _check_flops,
    "checkpointing": _check_checkpointing,
}
