"""Numbers in the sentences of README.md, from study.json and notes.json; scripts/pages.py puts them there."""

import json
from pathlib import Path

from forgetting_transformer.analysis import study_tables
from forgetting_transformer.analysis.studies import read_study


def sections(folder: Path) -> dict[str, str]:
    """What stands between the marks of README.md; `folder` is this study's."""
    study, notes = read_study(folder), json.loads((folder / "notes.json").read_text("utf-8"))
    models = study["models"]
    fox, transformer = models["fox_pro"], models["transformer_pro"]

    def octave(model: str, begin: int) -> float:
        """Mean loss of the positions from `begin` to twice that."""
        return next(slope["after"] for slope in models[model]["per_token_loss"]["slope"] if slope["position"] == begin)

    def apart(begin: int) -> str:
        """How far the Transformer is above FoX in such an octave."""
        return f"{next(row['loss'] for row in study['comparison'] if row['begin'] == begin):.2f}"

    beyond = {model: octave(model, 16_384) - octave(model, 8_192) for model in models}
    behind = next(row for row in study["comparison"] if row["begin"] == 16_384)
    first, last = fox["heads"][0][0], fox["heads"][0][-1]
    curves = [dict(model["heldout_curve"][0]) for model in (transformer, fox)]
    gaps = {tokens: loss - curves[1][tokens] for tokens, loss in curves[0].items()}
    passes = fox["tokens"][0] / study["corpus"]["total_tokens"]
    seconds = {name: f"{value // 60}:{value % 60:02d}" for name, value in notes["seconds"].items()}
    values = {
        "gain": f"{transformer['heldout_loss'][0] - fox['heldout_loss'][0]:.3f}",
        "gain_first": f"{gaps[min(gaps)]:.2f}",
        "gain_half": f"{gaps[157_286_400]:.2f}",
        "apart_256": apart(256),
        "apart_4096": apart(4_096),
        "apart_8192": apart(8_192),
        "apart_16384": apart(16_384),
        "beyond_fox": f"{beyond['fox_pro']:+.3f}",
        "beyond_transformer": f"{beyond['transformer_pro']:+.3f}",
        "behind": f"{behind['change']:.3f} ± {behind['change_error']:.3f}",
        "local_last": f"{100 * last['local']:.0f} %",
        "local_first": f"{100 * first['local']:.0f} %",
        "global_last": f"{round(144 * last['global'])}",
        "global_first": f"{round(144 * first['global'])}",
        "longest_first": f"{first['longest']:,.0f}",
        "longest_last": f"{last['longest']:,.0f}",
        "median_last": f"{last['median']:.0f}",
        "pruned_first": f"{100 * first['pruned']:.0f} %",
        "pruned_last": f"{100 * last['pruned']:.0f} %",
        "passes": f"{passes:.1f}",
        **{f"time_{name}": text for name, text in seconds.items()},
        **{f"rate_{name}": f"{rate:,.0f}" for name, rate in notes["tokens_per_second"].items()},
        **{f"mfu_{name}": f"{100 * share:.0f} %" for name, share in notes["mfu"].items()},
        "train_tokens": f"{study['corpus']['total_tokens']:,}",
    }
    return study_tables.sections(folder, folder / "README.md") | values
