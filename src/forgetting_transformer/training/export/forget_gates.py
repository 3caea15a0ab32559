"""A FoX (LLaMA) with the weights of a pretrained Transformer: rotary positions stay, forget gates are added.

Only config.json and safetensors of the source are read. Gates start at one memory length whatever the token is: their
weights are 0, and the bias b of a head gives f = sigmoid(b), which lets a weight decay to 1/e after that many tokens.
"""

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen3Config

from forgetting_transformer.command_line import one_line
from forgetting_transformer.files import explain
from forgetting_transformer.model import registry
from forgetting_transformer.model.mixers.forgetting_attention import decay_time_bias
from forgetting_transformer.model.mixers.transformer import TransformerConfig
from forgetting_transformer.training.export.card import CARD, text
from forgetting_transformer.training.export.folder import ExportError, find_model, read_weights

#: The default memory length, in contexts of the original.
CONTEXTS = 16
#: sigmoid of it is 1 in float32, and its derivative 0.
_OPEN = 128.0
_TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "*_map.json", "*.model", "chat_template*", "added_tokens.json")
_READ = ("config.json", "generation_config.json", "*.safetensors", *_TOKENIZER)
_FAMILIES: dict[str, Any] = {
    "LlamaForCausalLM": LlamaConfig, "MistralForCausalLM": MistralConfig, "Qwen3ForCausalLM": Qwen3Config,
    "TransformerForCausalLM": TransformerConfig,
}  # fmt: skip
#: Fields of sources that FoX does not have, with the value that switches them off, besides None.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,), "mlp_bias": (False,), "attention_dropout": (0.0,), "use_sliding_window": (False,),
    "quantization_config": (),
}  # fmt: skip
#: Fields that FoX has under the same names. It checks `hidden_act`.
_SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "initializer_range", "hidden_act",
    "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip
_BANDS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
#: Llama's names of a block's tensors, by ours.
_LLAMA = {
    "attn_norm.weight": ["input_layernorm.weight"],
    "mlp_norm.weight": ["post_attention_layernorm.weight"],
    "mlp.gate_proj.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.down_proj.weight": ["mlp.down_proj.weight"],
    **{f"attn.{name}.weight": [f"self_attn.{name}.weight"] for name in ("q_proj", "k_proj", "v_proj", "o_proj")},
    **{f"attn.{name}.weight": [f"self_attn.{name}.weight"] for name in ("q_norm", "k_norm")},
}


def add_forget_gates(source: str, out: Path, memory_length: Sequence[float] = ()) -> str:
    """Writes `out` and returns a summary of one line.

    Args:
        source: folder or hub id.
        out: folder; new or empty.
        memory_length: tokens, of all heads; or of the first and the last head of each layer, with those between spread
            logarithmically. `math.inf` computes what the source computes, and cannot learn. Default: `CONTEXTS`
            contexts of the source.

    Raises:
        ExportError: the source cannot be read, or has what FoX has not; or `out` cannot be written.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ExportError(f"OUT={out} is there already; choose another folder")
    try:
        folder = find_model(source, _READ)
        fields = json.loads((folder / "config.json").read_text("utf-8"))
        model_fields = _fields(fields)
        length = memory_length or (CONTEXTS * float(model_fields["max_position_embeddings"] or 2048),)
        bias_H = _bias(length, model_fields["num_heads"])
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent, ignore_cleanup_errors=True) as staged:
            new = Path(staged)
            parameters = _write(folder, new, model_fields, bias_H)
            tokenizer = _copy(folder, new)
            (new / CARD).write_text(_card(source, length, parameters, tokenizer), "utf-8")
            new.chmod(0o755)
            os.replace(new, out)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        reason = explain(error) if isinstance(error, OSError) else one_line(error)
        raise ExportError(f"SOURCE={source} cannot become OUT={out}: {reason}") from error
    without = "" if tokenizer else ", without a tokenizer, which the source has not"
    return f"{out} is {source} with forget gates, {parameters:,} parameters, memory length {_said(length)}{without}"


def _fields(read: dict[str, Any]) -> dict[str, Any]:
    """Fields of the FoX configuration. Raises ExportError naming the field of config.json that FoX cannot have."""
    kind = (read.get("architectures") or [read.get("model_type")])[0]
    if kind not in _FAMILIES:
        raise ExportError(f"architectures is {kind} in config.json; it must be {', '.join(_FAMILIES)}")
    config = _FAMILIES[kind].from_dict(read)
    ours = isinstance(config, TransformerConfig)
    rope = {"rope_type": "default"} if ours else config.rope_parameters
    rope_type = rope.get("rope_type", "default")
    checked = {name: (read.get(name), (None, *values)) for name, values in _NEUTRAL.items()}
    checked |= {
        "rope_type": (rope_type, ("default", "linear", "llama3")),
        "partial_rotary_factor": (rope.get("partial_rotary_factor"), (None, 1)),
        "layer_types": (getattr(config, "layer_types", None), (None, ["full_attention"] * config.num_hidden_layers)),
        "use_rope": (getattr(config, "use_rope", True), (True,)),
    }
    for name, (value, allowed) in checked.items():
        if value not in allowed:
            wanted = " or ".join(str(one) for one in allowed if one is not None)
            raise ExportError(f"{name} is {value} in config.json, which FoX has not; it must be {wanted}")
    if ours:
        made = {name: getattr(config, name) for name in registry.fields_of(TransformerConfig)}
        made |= {"intermediate_size": config.mlp_width}
    else:
        head_dim, heads = getattr(config, "head_dim", None), config.num_attention_heads
        made = {name: getattr(config, name) for name in _SAME} | {
            "num_heads": heads,
            "num_kv_heads": None if config.num_key_value_heads == heads else config.num_key_value_heads,
            "head_dim": None if head_dim in (None, config.hidden_size / heads) else head_dim,
            "norm_eps": config.rms_norm_eps,
            "window_size": config.sliding_window if config.model_type == "mistral" else None,
            "rope_base": float(rope["rope_theta"]),
        }
        if rope_type != "default":
            made["rope_factor"] = float(rope["factor"])
        if rope_type == "llama3":
            made["rope_llama3"] = [float(rope[name]) for name in _BANDS]
        if config.model_type == "qwen3":
            made |= {"qk_norm": True, "qk_norm_share_param_across_head": True, "qk_norm_eps": config.rms_norm_eps}
    return made | {"dtype": config.dtype, "use_rope": True, "log_pruning_tolerance": -10.0, "fgate_type": "full"}


def _bias(memory_length: Sequence[float], num_heads: int) -> Tensor:
    """Biases of gates `(H,)`, float32.

    Raises:
        ExportError: lengths that cannot be.
    """
    first, last = memory_length[0], memory_length[-1]
    if len(memory_length) > 2 or not 0 < first <= last or (math.isinf(last) and first != last):
        raise ExportError(
            f"--memory_length={' '.join(f'{x:g}' for x in memory_length)} must be inf, a number of tokens, or two that "
            "rise, as in 4096 1e6"
        )
    return torch.full((num_heads,), _OPEN) if math.isinf(last) else decay_time_bias(num_heads, first, last)


def _write(folder: Path, new: Path, fields: dict[str, Any], bias_H: Tensor) -> int:
    """Writes configuration and weights, and returns the number of parameters.

    Raises:
        ExportError: FoX refuses a field, or has other tensors.
    """
    dtype = fields.pop("dtype")
    try:
        config = registry.build_config("forgetting_transformer", **fields)
    except (TypeError, ValueError) as error:
        raise ExportError(f"config.json: {one_line(error)}") from error
    lm_class = registry.get("forgetting_transformer").lm_class
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in lm_class(config).named_parameters()}
    tensors, state = read_weights(folder), {}
    llamas = "model.embed_tokens.weight" in tensors
    for name, shape in shapes.items():
        sources = _sources(name, llamas)
        if lacks := [source for source in sources if source not in tensors]:
            raise ExportError(f"the source has no {lacks[0]}, from which {name} is made; download it again")
        if sources:
            state[name] = torch.cat([tensors.pop(source) for source in sources])
        else:
            state[name] = bias_H.clone() if name.endswith("bias") else torch.zeros(shape)
        if state[name].shape != shape:
            raise ExportError(
                f"{sources[0]} has shape {tuple(state[name].shape)} and config.json makes it {tuple(shape)}"
            )
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if extra := sorted(name for name in tensors.keys() - tied if not name.endswith("rotary_emb.inv_freq")):
        raise ExportError(f"the source has {extra[0]}, for which FoX has no place; biases and adapters are not taken")
    save_torch_state_dict(state, new)
    for file in new.glob("*.safetensors"):  # safetensors makes them readable for their owner alone
        file.chmod(0o644)
    config.architectures, config.dtype = [lm_class.__name__], dtype
    config.save_pretrained(new)
    decided = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")  # by the corpus
    model = {name: value for name, value in fields.items() if name not in decided and value is not None}
    (new / "configs" / "model").mkdir(parents=True)
    with_gates = {"name": "forgetting_transformer", "label": "with_gates", "config": model}
    (new / "configs/model/with_gates.yaml").write_text(yaml.safe_dump(with_gates, sort_keys=False), "utf-8")
    return sum(shape.numel() for shape in shapes.values())


def _sources(name: str, llamas: bool) -> list[str]:
    """The source's tensors that make ours of this name; none for those of gates.

    Args:
        llamas: whether the source has Llama's names, or ours.
    """
    block = re.fullmatch(r"(model\.layers\.\d+\.)(.+)", name)
    if block and ".fgate_proj." in name:
        return []
    if not llamas:
        return [name]
    if block is None:
        return [name.replace("model.embeddings.", "model.embed_tokens.")]
    return [f"{block[1]}{theirs}" for theirs in _LLAMA[block[2]]]


def _copy(folder: Path, new: Path) -> bool:
    """Copies the tokenizer and the settings of generation; returns whether there is a tokenizer."""
    files = {file for pattern in _TOKENIZER for file in folder.glob(pattern) if file.is_file()}
    for file in {*files, *folder.glob("generation_config.json")}:
        shutil.copyfile(file, new / file.name)
    return any(file.name in ("tokenizer.json", "tokenizer_config.json") for file in files)


def _said(memory_length: Sequence[float]) -> str:
    return " to ".join(f"{length:,.0f}" for length in memory_length) + " tokens"


def _card(source: str, memory_length: Sequence[float], parameters: int, has_tokenizer: bool) -> str:
    shown = Path(source).name if Path(source).exists() else source
    about = (
        f"{shown} as a Forgetting Transformer with {parameters:,} parameters: the same weights, and a forget gate for "
        f"every head. Gates start at a memory length of {_said(memory_length)} and were not trained."
    )
    licence = "The licence of the original holds for these weights too."
    return text(f"{shown} with forget gates", about, has_tokenizer, licence=licence)
