#!/usr/bin/env python
"""Repeats one step of a training run and shows its batch, losses and gradients.

    python scripts/replay.py output_dir=output/demo step=1048576
    python scripts/replay.py output_dir=output/demo step=1048576 data_dir=/elsewhere out=step.npz

output_dir    the run's folder
step          training tokens after the step, as in train.jsonl and bad_step.jsonl
data_dir      the corpus, if it has moved
device        cuda or cpu; default: cuda if available
tokenizer     folder or hub id, if the run has no tokenizer (LongCrawl64: gpt2)
sequences     number of sequences to print, highest loss first; default 4
characters    number of characters of each; default 300
plugins       [my_lab]: plug-ins that the run needs
out           a file for input_ids_BT, labels_BT and loss_BT in full

The script loads the newest checkpoint before the step; the run may still be training. It runs the step's batch forward
and backward in the run's precision. It prints the decoded text, the loss at positions that are powers of 2, the tokens
with the highest loss, and for each layer the norms of weights and gradients and the forget gates.
"""

import itertools
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forgetting_transformer import command_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forgetting_transformer.training.replay import Replay


#: What `out` gets.
ARRAYS = ("input_ids_BT", "labels_BT", "loss_BT")


@dataclass
class Settings:
    output_dir: str = ""
    step: int = -1
    data_dir: str | None = None
    device: str | None = None
    tokenizer: str | None = None
    sequences: int = 4
    characters: int = 300
    out: str | None = None
    plugins: str = "[]"


def parse(arguments: Sequence[str]) -> Settings:
    """Settings from key=value arguments; an error names the key."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    settings = OmegaConf.structured(Settings)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or key not in Settings.__dataclass_fields__:
            raise ValueError(f"{argument!r}: give key=value, with one of {', '.join(Settings.__dataclass_fields__)}")
        try:
            settings[key] = value
        except OmegaConfBaseException as error:
            raise ValueError(f"{argument!r}: {str(error).splitlines()[0]}") from error
        if key in ("output_dir", "data_dir", "tokenizer", "out") and not value.strip():
            raise ValueError(f"{key}={value!r} is empty (a variable that is not set?); give a path or a name")
    if not settings.output_dir or settings.step < 0:
        raise ValueError("output_dir=… and step=… are needed; --help explains them")
    for key in ("sequences", "characters"):
        if settings[key] < 0:
            raise ValueError(f"{key}={settings[key]} must be at least 0")
    return OmegaConf.to_object(settings)


def check_out(out: str) -> None:
    """Looks whether `out` can be written, and changes nothing.

    Raises:
        ValueError: it cannot be, or is not of a replay; naming the key and the fix.
    """
    file = file_of(out)
    try:
        if file.is_file() and not (zipfile.is_zipfile(file) and names_in(file) == {*ARRAYS}):
            raise ValueError(f"out={out}: {file} is not of a replay; name another file, or move it away")
        if file.exists():
            file.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise ValueError(not_written(out, error)) from error


def names_in(archive: Path) -> set[str]:
    with zipfile.ZipFile(archive) as opened:
        return {name.removesuffix(".npy") for name in opened.namelist()}


def file_of(out: str) -> Path:
    """The file that NumPy writes."""
    return Path(out if out.endswith(".npz") else f"{out}.npz")


def not_written(out: str, error: OSError) -> str:
    return (
        f"out={out}: {file_of(out)} cannot be written ({error.strerror or error}); give a file in a folder where you "
        "may write"
    )


def show(found: "Replay", tokenizer: "PreTrainedTokenizerBase | None", settings: Settings) -> str:
    import numpy as np

    where = found.where
    lines = [f"step {found.step:,}: batch {found.batch:,}, {where}"]
    start = f"the checkpoint at {found.checkpoint_step:,} tokens" if found.checkpoint_step else "the initial weights"
    older = f", {found.steps_before} steps older than the run's at this step" if found.steps_before else ""
    lines.append(f"weights: {start}{older}")
    lines.append(f"loss {found.loss_BT.mean():.4f}, gradient norm {found.grad_norm:.4g} before clipping")

    length = found.loss_BT.shape[1]
    lines += ["", "position      mean loss   highest"]
    edges = [0, *(2**n for n in range(length.bit_length()) if 2**n < length), length]
    for begin, end in itertools.pairwise(edges):
        part = found.loss_BT[:, begin:end]
        lines.append(f"{f'{begin}–{end - 1}':<12} {part.mean():10.4f} {part.max():9.4f}")

    def text(ids: "np.ndarray") -> str:
        return repr(tokenizer.decode(ids.tolist())) if tokenizer else " ".join(map(str, ids.tolist()))

    order = np.argsort(-np.where(np.isfinite(found.loss_BT), found.loss_BT, np.inf).mean(axis=1), kind="stable")
    for row in order[: settings.sequences]:
        losses = found.loss_BT[row]
        hardest = np.argsort(-np.where(np.isfinite(losses), losses, np.inf))[:5]
        tokens = ", ".join(f"{text(found.labels_BT[row, p : p + 1])} at {p}: {losses[p]:.2f}" for p in sorted(hardest))
        lines += [
            "",
            f"{where.sequence(row)}: loss {losses.mean():.4f}; hardest: {tokens}",
            text(found.labels_BT[row])[: settings.characters],
        ]

    gated = any("fgate_mean" in layer for layer in found.layers)
    lines += ["", f"{'layer':<12} {'weights':>10} {'gradient':>10}" + (GATES if gated else "")]
    for layer in found.layers:
        line = f"{layer['layer']:<12} {layer['weight_norm']:10.4g} {layer['grad_norm']:10.4g}"
        if "fgate_mean" in layer:
            values = (
                layer[k] for k in ("fgate_mean", "fgate_median", "fgate_min", "fgate_below_half", "fgate_above_0.99")
            )
            line += "".join(f" {value:8.4f}" for value in values)
        if layer["gradients_not_finite"]:
            line += f"  {layer['gradients_not_finite']:,} gradients are not finite"
        lines.append(line)
    if not gated:
        lines.append("this architecture does not name forget gates (a mixer does with a method log_forget_gate)")
    return "\n".join(lines)


#: Forget gates f: their mean, median and minimum, and the shares of them below 0.5 and above 0.99.
GATES = "".join(f" {name:>8}" for name in ("f mean", "median", "min", "< 0.5", "> 0.99"))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    import numpy as np

    from forgetting_transformer import plugins
    from forgetting_transformer.data import DataError
    from forgetting_transformer.training.checkpoint import CheckpointError
    from forgetting_transformer.training.config import ConfigError
    from forgetting_transformer.training.replay import replay

    try:
        settings = parse(arguments)
        plugins.load(plugins.named_in([f"plugins={settings.plugins}"]))
        if settings.out is not None:
            check_out(settings.out)
        folder = Path(settings.output_dir)
        found, tokenizer = replay(folder, settings.step, settings.data_dir, settings.device)
        if settings.tokenizer is not None:
            from forgetting_transformer.model_tokenizer import load_tokenizer

            tokenizer = load_tokenizer(settings.tokenizer)
        print(show(found, tokenizer, settings))
        if settings.out is not None:
            arrays = {name: getattr(found, name) for name in ARRAYS}
            try:
                np.savez_compressed(settings.out, **arrays)
            except OSError as error:
                raise ValueError(not_written(settings.out, error)) from error
    except (ValueError, OSError, DataError, CheckpointError, ConfigError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(command_line.run(main))
