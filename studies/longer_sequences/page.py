"""Numbers in the sentences of README.md, from study.json and notes.json; studies/pages.py puts them there."""

import json
import statistics
from pathlib import Path
from typing import Any

from forgetting_transformer.analysis.tables import markdown_table
from studies.engine import tables as study_tables
from studies.engine.claim_rules import GLOBAL, LOCAL
from studies.engine.results import read_study


def sections(folder: Path) -> dict[str, str]:
    """What stands between the marks of README.md; `folder` is this study's."""
    study, notes = read_study(folder), json.loads((folder / "notes.json").read_text("utf-8"))
    models = study["models"]
    fox, transformer = models["fox_pro"], models["transformer_pro"]
    measured, blocks = fox["heads"][0], notes["memory_of_heads_by_block"]
    heads, length = sum(map(len, blocks)), fox["train_length"]

    def beyond(model: dict[str, Any]) -> str:
        """Change from the last octave before the training length to the first one after it."""
        slope = next(slope for slope in model["per_token_loss"]["slope"] if slope["position"] == length)
        return f"{slope['per_doubling']:+.3f} ± {slope['standard_error']:.3f}"

    def apart(begin: int) -> dict[str, Any]:
        """The Transformer against FoX, in the octave that begins there."""
        return next(row for row in study["comparison"] if row["begin"] == begin)

    def percent(which: int, share: str) -> str:
        return f"{100 * measured[which][share]:.0f} %"

    of_fox = dict(fox["heldout_curve"][0])
    gaps = [loss - of_fox[tokens] for tokens, loss in transformer["heldout_curve"][0]]
    steps = notes["milliseconds_per_step"].values()
    reach = [round(heads * measurement["global"]) for measurement in measured]
    medians = [measurement["median"] for measurement in measured]
    values = {
        "gain": f"{gaps[-1]:.3f}",
        "gain_first": f"{gaps[0]:.2f}",
        "gain_half": f"{gaps[len(gaps) // 2 - 1]:.2f}",
        "apart_near": f"{apart(256)['loss']:.3f} ± {apart(256)['loss_error']:.3f}",
        "apart_far": f"{apart(length // 2)['loss']:.3f} ± {apart(length // 2)['loss_error']:.3f}",
        "behind": f"{apart(length)['change']:.3f} ± {apart(length)['change_error']:.3f}",
        "beyond_fox": beyond(fox),
        "beyond_transformer": beyond(transformer),
        "heads": str(heads),
        "local_first": percent(0, "local"),
        "local_last": percent(-1, "local"),
        "reach_first": str(reach[0]),
        "reach_last": str(reach[-1]),
        "reach_most": str(max(reach)),
        "median_least": f"{min(medians):.0f}",
        "median_most": f"{max(medians):.0f}",
        "longest_least": f"{min(m['longest'] for m in measured):,.0f}",
        "longest_most": f"{max(m['longest'] for m in measured):,.0f}",
        "pruned_first": percent(0, "pruned"),
        "pruned_last": percent(-1, "pruned"),
        "passes": f"{fox['tokens'][0] / study['corpus']['total_tokens']:.1f}",
        "pass_tokens": f"{study['corpus']['total_tokens']:,}",
        "per_parameter": f"{fox['tokens'][0] / fox['body_parameters']:.1f}",
        **{f"time_{name}": f"{value // 60}:{value % 60:02d}" for name, value in notes["seconds"].items()},
        **{f"rate_{name}": f"{rate:,.0f}" for name, rate in notes["tokens_per_second"].items()},
        "mfu": f"{100 * notes['mfu']['transformer_pro']:.0f} %",
        "step_least": f"{min(step['least_of_16'] for step in steps):.0f}",
        "step_most": f"{max(step['most_of_16'] for step in steps):.0f}",
    }
    rows = [
        [
            str(number),
            f"{statistics.median(lengths):,.0f}",
            f"{max(lengths):,.0f}",
            str(sum(memory < LOCAL * length for memory in lengths)),
            str(sum(memory >= GLOBAL * length for memory in lengths)),
        ]
        for number, lengths in enumerate(blocks)
    ]
    table = markdown_table(["block", "median", "longest", "local heads", "global heads"], rows, "rrrrr")
    return study_tables.sections(folder, folder / "README.md") | values | {"blocks": table}
