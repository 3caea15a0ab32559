"""Checks of an architecture on a tiny model, for what training, evaluation and generation rely on.

They are for architectures of a user's own package, look at a model from outside only, and take seconds on a CPU. The
model is in float32. Noise is added to every parameter first: a projection that starts at zero, or a gate that starts
shut, would hide what is behind it.

Axes: `forgetting_transformer/ops/__init__.py`.
"""

import json
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from forgetting_transformer.model import registry
from forgetting_transformer.model.generation.cache import CACHE_NAME

#: Difference that rounding explains, relative to the largest number compared. Built-in models stay below a tenth of it.
TOLERANCE = 1e-4
#: Standard deviation of the noise that is added to every parameter.
NOISE = 0.1
# All sizes differ, so that no two axes can be taken for each other. The length is more than a chunk of the recurrences.
BATCH, LENGTH, PADDING, PROMPT = 3, 80, 11, 68
#: Tokens that are changed: near the beginning, inside, on both sides of a chunk's edge, the last.
CHANGED = (1, 17, 63, 64, LENGTH - 1)
#: Fields without which a small mixer of the architecture cannot be made.
_OWN_FIELDS: dict[str, dict[str, Any]] = {
    "hgrn2": {"expand_ratio": 16},
    "samba": {"attn": {"num_heads": 2, "num_kv_heads": 2, "window_size": 32, "layers": None}},
}


class Result(NamedTuple):
    """Outcome of one check: its name, whether the model passed, one line with the measurement or the error, and the
    traceback of the error that ended it, "" without one."""

    name: str
    is_ok: bool
    detail: str
    traceback: str = ""


class CheckFailed(Exception):
    """A check failed; the message has the error and the likely fix."""


def check_architecture(name: str, fields: Mapping[str, Any] | None = None) -> list[Result]:
    """Check the architecture that is registered under `name`; its plug-in must be loaded.

    Args:
        fields: of its configuration, in the place of those of a tiny one.

    Returns:
        A result for each check, in their order. If no model can be made, for "build" alone.

    Raises:
        ValueError: no architecture has this name.
    """
    registry.get(name)
    first, *others = CHECKS.items()
    build = _run(*first, name, fields)
    return [build, *(_run(*other, name, fields) for other in others if build.is_ok)]


def _run(title: str, check: Callable[[Any, Tensor], str], name: str, fields: Mapping[str, Any] | None) -> Result:
    """Run a check on a model of its own, which it may change."""
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore", FutureWarning)  # PyTorch's and transformers' own
            torch.manual_seed(0)
            model: Any = registry.get(name).lm_class(registry.build_config(name, **tiny_fields(name, fields))).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(NOISE * torch.randn_like(parameter))
            return Result(title, True, check(model, torch.randint(model.config.vocab_size, (BATCH, LENGTH))))
    except CheckFailed as failed:
        return Result(title, False, str(failed))
    except Exception as error:  # the checked code may raise anything
        return Result(title, False, f"{type(error).__name__}: {' '.join(str(error).split())}", traceback.format_exc())


def tiny_fields(name: str, fields: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields of a tiny configuration of architecture `name`, with `fields` in their place.

    A hybrid has four blocks, and a tiny mixer for each architecture that its pattern may name.
    """
    fields = dict(fields or {})
    tiny: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4 if name == "hybrid" else 2, "vocab_size": 61}
    tiny |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")) | _tiny_mixer(name)
    if name == "hybrid" and isinstance(given := fields.get("mixers", {}), dict):
        others = (other for other in registry.model_names() if other != "hybrid")
        fields["mixers"] = {other: {"architecture": other, **_tiny_mixer(other)} for other in others} | given
    return tiny | fields


def _tiny_mixer(name: str) -> dict[str, Any]:
    has_heads = isinstance(getattr(registry.get(name).config_class, "num_heads", None), int)
    return ({"num_heads": 2} if has_heads else {}) | _OWN_FIELDS.get(name, {})


@torch.no_grad()
def _logits(model: Any, ids: Tensor, lengths: Sequence[int] | None = None, mask: Tensor | None = None) -> Tensor:
    """`(B, T, V)` of a sequence: at once without a cache, or in pieces, each onto the cache of those before."""
    if lengths is None:
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    pieces, cache, start = [], model.new_cache(), 0
    for piece in ids.split(list(lengths), dim=1):
        # The cache remembers where sequences begin.
        first_mask = mask[:, : piece.shape[1]] if mask is not None and start == 0 else None
        start += piece.shape[1]
        pieces.append(model(input_ids=piece, attention_mask=first_mask, use_cache=True, **{CACHE_NAME: cache}).logits)
        for block, layer in enumerate(cache.layers):
            if (held := layer.get_seq_length()) != start:
                raise CheckFailed(
                    f"the cache of block {block} counts {held} tokens after {start} were read; forward "
                    "must update the cache that it is given with all new tokens"
                )
    return torch.cat(pieces, dim=1)


def _check_same(got: Tensor, want: Tensor, what: str, fix: str) -> float:
    """The largest difference between two tensors `(B, T, …)`, which must be rounding."""
    difference_T = (got - want).abs().nan_to_num(nan=torch.inf).flatten(2).amax((0, 2))
    limit, difference = TOLERANCE * want.abs().nan_to_num(nan=0, posinf=0).max().item(), difference_T.max().item()
    if not difference <= limit:
        first = int((difference_T > limit).nonzero()[0])
        raise CheckFailed(f"{what} by {difference:.2g}, first at token {first} (tolerance {limit:.1g}); {fix}")
    return difference


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _check_build(model: Any, ids: Tensor) -> str:
    for block in range(model.config.num_hidden_layers):
        if not 0 < (flops := model.config.mixer_flops_per_token(block, LENGTH)) < float("inf"):
            raise CheckFailed(f"mixer_flops_per_token({block}, {LENGTH}) is {flops}; it must be a positive number")
    logits, flops = _logits(model, ids), model.config.flops_per_token(LENGTH, training=False)
    if count := int((~logits.isfinite()).sum()):
        raise CheckFailed(
            f"{count:,} of {logits.numel():,} logits are not finite; look for logarithms, roots and divisions of what "
            f"may be 0 or less (noise of {NOISE} was added to every parameter, which training may move as far)"
        )
    mixers = ", ".join(dict.fromkeys(type(block.sequence_mixer).__name__ for block in model.decoder.layers))
    return f"{type(model).__name__} of {mixers}, {model.num_parameters():,} parameters, {flops:,.0f} FLOPs per token"


def _check_causality(model: Any, ids: Tensor) -> str:
    before, largest, reach = _logits(model, ids), 0.0, 0.0
    for token in CHANGED:
        changed = ids.clone()
        changed[:, token] = (ids[:, token] + 1) % model.config.vocab_size
        after, what = _logits(model, changed), f"changing token {token} changes logits before it"
        fix = "look for sums, means, norms, reversed scans or convolutions over all of T, and for a missing causal mask"
        largest = max(largest, _check_same(after[:, :token], before[:, :token], what, fix))
        reach = max([reach, *(after - before)[:, token + 1 :].abs().flatten().tolist()])
    if reach <= TOLERANCE * before.abs().max().item():
        raise CheckFailed(f"changing tokens changes no later logits (by {reach:.1g}); the mixer reads no earlier token")
    for row in range(BATCH):
        changed, others = ids.clone(), torch.arange(BATCH) != row
        changed[row] = (ids[row] + 1) % model.config.vocab_size
        what, fix = (
            f"changing sequence {row} of a batch changes others",
            "look for means, norms and views over the batch",
        )
        largest = max(largest, _check_same(_logits(model, changed)[others], before[others], what, fix))
    return f"a token changes logits before it, or of other sequences, by {largest:.1g}, later ones by {reach:.1g}"


def _check_gradients(model: Any, ids: Tensor) -> str:
    model.train()(input_ids=ids[:, :-1], labels=ids[:, 1:]).loss.mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    if unused := [name for name, grad in gradients.items() if grad is None]:
        raise CheckFailed(f"no gradient for {_some(unused)}; use it, remove it, or set requires_grad=False")
    if wrong := [name for name, grad in gradients.items() if not grad.isfinite().all()]:
        raise CheckFailed(f"the gradient is not finite for {_some(wrong)}; look for roots and norms at 0")
    if zero := [name for name, grad in gradients.items() if not grad.any()]:
        raise CheckFailed(f"the gradient is zero for {_some(zero)}; look for factors of 0, clamps and rounding")
    return f"{len(gradients)} parameters have one that is finite and not zero"


def _check_cache(model: Any, ids: Tensor) -> str:
    whole, largest = _logits(model, ids), 0.0
    for lengths in ([PROMPT, *[1] * (LENGTH - PROMPT)], [1, 3, 60, 16]):
        what = f"logits of pieces of {', '.join(map(str, lengths[:4]))}, … tokens differ from those of all at once"
        fix = "the state must be the one after the last token, be read by the next call and hold the inputs it needs"
        largest = max(largest, _check_same(_logits(model, ids, lengths), whole, what, fix))
    return f"read in pieces or one by one, logits differ by {largest:.1g}"


def _check_padding(model: Any, ids: Tensor) -> str:
    mask, largest, ones = torch.ones_like(ids), 0.0, [1] * (LENGTH - PROMPT)
    mask[0, :PADDING] = 0
    # In the same pieces, so that only padding can make a difference.
    for padded, alone in ((None, None), ([PROMPT, *ones], [PROMPT - PADDING, *ones])):
        what = f"logits of a sequence with {PADDING} tokens of left padding differ from those of it alone"
        what += " with a cache" if padded else ""
        fix = "zero_padding(hidden_BTE, padding_BT) in a recurrence, seq_start_B in attention"
        got, want = _logits(model, ids, padded, mask)[:1, PADDING:], _logits(model, ids[:1, PADDING:], alone)
        largest = max(largest, _check_same(got, want, what, fix))
    return f"logits differ by {largest:.1g} from those of the sequence alone, also with a cache"


def _check_saving(model: Any, ids: Tensor) -> str:
    auto: Any = AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = auto.from_pretrained(folder, trust_remote_code=False).eval()
    for name in sorted(registry.fields_of(type(model.config))):
        old, new = (json.dumps(getattr(m.config, name), sort_keys=True, default=str) for m in (model, loaded))
        if old != new:
            raise CheckFailed(
                f"the field {name} was {old} and is {new} after loading; __post_init__ must not change its own result"
            )
    tensors = dict([*loaded.named_parameters(), *loaded.named_buffers()])
    own = [*model.named_parameters(), *model.named_buffers()]
    if changed := [name for name, x in own if name not in tensors or not torch.equal(x, tensors[name])]:
        raise CheckFailed(
            f"{_some(changed)} has other values after loading; init_own_weights must write through "
            "transformers.initialization, also into buffers with persistent=False, which are not saved"
        )
    what, fix = "logits of the loaded model differ", "all that forward depends on must be in weights or configuration"
    difference = _check_same(_logits(loaded, ids), _logits(model, ids), what, fix)
    return f"saved and loaded, logits differ by {difference:.1g}"


_IN_ORDER = (_check_build, _check_causality, _check_gradients, _check_cache, _check_padding, _check_saving)
#: By name, in the order in which they are run: the first ones explain failures of the later ones.
CHECKS: dict[str, Callable[[Any, Tensor], str]] = {check.__name__.removeprefix("_check_"): check for check in _IN_ORDER}
