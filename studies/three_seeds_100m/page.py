"""Numbers and tables of README.md from study.json and those of other studies; studies/pages.py puts them there."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from forgetting_transformer.analysis import position_loss, statistics
from forgetting_transformer.analysis.tables import markdown_table, rate_text
from studies.engine import tables as study_tables
from studies.engine.numbers import FOUND, StudyNumbers, in_words
from studies.engine.results import contrasts, differences, display_name, losses_by_seed

MODELS = ("fox_pro", "fox_llama", "transformer_pro", "transformer_llama", "mamba2", "hgrn2", "delta_net")
RECURRENT = ("mamba2", "hgrn2", "delta_net")
FOX = ("fox_pro", "fox_llama")
#: Of FoX (Pro) and the Transformer (Pro): the study's rate of one is the other rate of the other.
RATES = (1e-3, 2e-3)
#: A model, and the one that it is compared with.
PAIRS = (
    ("transformer_pro", "fox_pro"), ("transformer_llama", "fox_llama"), ("fox_llama", "fox_pro"),
    *((name, "fox_pro") for name in RECURRENT),
)  # fmt: skip


def sections(folder: Path) -> dict[str, str]:
    """What stands between the marks of README.md; `folder` is this study's."""
    here, short, one_seed = (
        StudyNumbers.read(folder.parent / name, models=MODELS) for name in (folder.name, "three_seeds", "seven_models")
    )
    found = numbers(folder) | needles(here) | next_line(here) | against_shorter(here, short)
    found["flattens_without_largest"] = without_largest_group(here)
    tables = {"over_training": over_training(here), "earlier": earlier(here, short, one_seed)}
    return found | tables | study_tables.sections(folder, folder / "README.md")


def numbers(folder: Path) -> dict[str, str]:
    """Those of the sentences, some of which README.md of the project has too."""
    of_study = StudyNumbers.read(folder, models=MODELS)
    study, heads = of_study.study, of_study.of_heads
    found = differences(contrasts(study, "models"))
    losses = {name: losses_by_seed(study["models"][name]) for name in MODELS}
    longer = StudyNumbers.read(folder.parent / "longer_sequences", models=("transformer_pro", "fox_pro"))
    flops = {name: study["models"][name]["flops_per_token"] for name in MODELS}
    recurrent = sorted(found[name].value for name in RECURRENT)

    def claimed(beginning: str, model: str) -> str:
        return of_study.claimed(beginning, model).removeprefix("+")

    def faster(name: str) -> str:
        return f"{100 * of_study.measured('pruning makes training faster', name).value:.0f} %"

    return {
        "pro_gain": found["transformer_pro"].text(),
        "llama_gain": claimed("FoX is better than the Transformer", "transformer_llama"),
        "behind_least": f"{recurrent[0]:.2f}",
        "behind_most": f"{recurrent[-1]:.2f}",
        "pro_parts": f"{found['fox_llama'].value:.2f}",
        "pro_parts_transformer": f"{of_study.measured('the Pro', 'transformer_llama').value:.2f}",
        "below_fox_llama": in_words(of_study.apart("fox_llama", "transformer_pro")),
        "flattens_mamba2": claimed("the loss of recurrent models flattens", "mamba2"),
        **{f"seeds_{name}": in_words([of[seed] for seed in sorted(of)]) for name, of in losses.items()},
        "pro_pairs": in_words(of_study.apart("transformer_pro", "fox_pro")),
        "llama_pairs": in_words(of_study.apart("transformer_llama", "fox_llama")),
        **with_equal_rates(of_study),
        "bartlett": f"{statistics.equal_noise([[*of.values()] for of in losses.values()]):.2f}",
        "longer_gain": f"{_end(longer, 'transformer_pro', 'fox_pro'):.3f}",
        **{f"beyond_{name}": f"{of_study.beyond(name):+.2f}" for name in MODELS},
        **{f"faster_{name}": faster(name) for name in FOX},
        **{f"global_{name}": f"{100 * heads(name, -1, 'global'):.1f} %" for name in FOX},
        **{f"longest_first_{name}": f"{heads(name, 0, 'longest'):,.0f}" for name in FOX},
        **{f"longest_last_{name}": f"{heads(name, -1, 'longest'):,.0f}" for name in FOX},
        **{f"pruned_first_{name}": f"{100 * heads(name, 0, 'pruned'):.0f} %" for name in FOX},
        **{f"pruned_last_{name}": f"{100 * heads(name, -1, 'pruned'):.0f} %" for name in FOX},
        **{f"flops_{name}": f"{flops[name] / 1e6:.0f}" for name in ("fox_pro", *RECURRENT)},
    }


def needles(here: StudyNumbers) -> dict[str, str]:
    """How many answers of a model find the needle, by seed, and the most words of the answers of models that find none.

    Raises:
        LookupError: one of these finds it, against what the sentences say.
    """
    found = {}
    for model in ("fox_pro", "fox_llama", "transformer_pro"):
        for mode in ("standard", "easy"):
            for where in ("inside", "beyond"):
                by_seed = here.answers_by_seed(model, mode, where == "beyond")
                counts = [sum(answer.found for answer in answers) for answers in by_seed]
                found[f"found_{model}_{mode}_{where}"] = in_words(counts, 0)

    def words(model: str) -> list[int]:
        both = [here.answers(model, mode, beyond) for mode in ("standard", "easy") for beyond in (False, True)]
        return [answer.words for answers in both for answer in answers]

    most = {name: max(words(name)) for name in ("transformer_llama", *RECURRENT)}
    if max(most.values()) >= FOUND:
        raise LookupError(f"{here.place / 'README.md'} says who finds no needle, and study.json says otherwise: {most}")
    easy = [answer for answer in here.answers("fox_pro", "easy", beyond=False) if answer.found]
    return found | {
        "all_fox_pro_easy_inside": str(len(easy)),
        "exact_fox_pro_easy_inside": str(sum(answer.exact for answer in easy)),
        "words_transformer_llama": str(most["transformer_llama"]),
        "words_recurrent": str(max(most[name] for name in RECURRENT)),
    }


def next_line(here: StudyNumbers) -> dict[str, str]:
    """Choosing and writing the next line of code.

    Raises:
        LookupError: nobody was asked, or the answers are of another corpus.
    """
    differences = here.study["score_differences"]

    def apart(model: str, score: str) -> str:
        found = differences[model][score]
        return statistics.Estimate(found["value"], found["half_width"]).text("+", digits=1)

    counted = json.loads((here.place / "next_line_answers.json").read_text("utf-8"))
    _check_corpus(here, counted, "next_line_answers.json", "studies/count_answers.py")
    scores, found = here.study["scores"], {}
    for name in ("fox_pro", "mamba2"):
        runs = [(of_run, counted["runs"][run]) for run, of_run in scores[name].items()]
        found[f"no_code_{name}"] = in_words([answers["no_code"] for _, answers in runs], 0)
        of_code = [
            of_run["next line/similarity"] * answers["answers"] / (answers["answers"] - answers["no_code"])
            for of_run, answers in runs
        ]
        found[f"of_code_{name}"] = f"{mean(of_code):.1f}"
    return found | {
        "acc_transformer_pro": apart("transformer_pro", "next_line/acc"),
        "acc_of_fox_pro": f"{mean(of_run['next_line/acc'] for of_run in scores['fox_pro'].values()):.0f}",
        "writes_mamba2": apart("mamba2", "next line/similarity"),
        "writes_hgrn2": apart("hgrn2", "next line/similarity"),
        "most_right": str(max(answers["right"] for answers in counted["runs"].values())),
    }


def with_equal_rates(here: StudyNumbers) -> dict[str, str]:
    """FoX (Pro) and the Transformer (Pro) with each other's learning rate too; rates_*.jsonl have a line per run.

    The noise is that of the study's runs and these, and each interval holds for itself.

    Raises:
        LookupError: a run is of another corpus.
    """
    fox, transformer, (low, high) = "fox_pro", "transformer_pro", RATES
    study = here.study["models"]
    losses: dict[tuple[str, float], dict[int, float]] = {
        (name, study[name]["learning_rate"]): losses_by_seed(study[name]) for name in MODELS
    }
    for name in (fox, transformer):
        for line in (here.place / f"rates_{name}.jsonl").read_text("utf-8").splitlines():
            run = json.loads(line)
            _check_corpus(
                here, run, f"rates_{name}.jsonl", "the runs with other learning rates, and study_report.py recipes"
            )
            losses.setdefault((name, run["rate"]), {})[run["seed"]] = run["heldout_loss"][0]

    def apart(one: tuple[str, float], other: tuple[str, float]) -> statistics.Estimate:
        return statistics.against_baseline(losses, other, compared={one}).against[one]

    lead = {rate: apart((transformer, rate), (fox, rate)) for rate in RATES}
    rows = [
        [display_name(here.study, name), *(statistics.mean([*losses[name, rate].values()]).text() for rate in RATES)]
        for name in (fox, transformer)
    ]
    rows.append([_pair(here, (transformer, fox)), *(lead[rate].text() for rate in RATES)])
    found = {
        "rates": markdown_table(["rate", *map(rate_text, RATES)], rows, "lrr"),
        # At the higher rate for both the lead is smaller by what the Transformer gains, at the lower by what FoX loses.
        "less_high": apart((transformer, low), (transformer, high)).text(),
        "less_low": apart((fox, low), (fox, high)).text(),
    }
    for which, rate in (("low", low), ("high", high)):
        pairs = [losses[transformer, rate][seed] - loss for seed, loss in sorted(losses[fox, rate].items())]
        found |= {
            f"lead_{which}": lead[rate].text(),
            f"lead_{which}_pairs": in_words(pairs),
            f"lead_{which}_alone": statistics.mean(pairs).text(),
        }
    return found


def _check_corpus(here: StudyNumbers, content: Mapping[str, Any], file: str, made_by: str) -> None:
    """
    Raises:
        LookupError: the content of the file is of another corpus than the study.
    """
    if content["corpus"] != (corpus := here.study["corpus"]["fingerprint"]):
        raise LookupError(
            f"{here.place / file} is of corpus {content['corpus']} and study.json of {corpus}: run {made_by}"
        )


def without_largest_group(here: StudyNumbers) -> str:
    """How Mamba-2's loss changes against FoX (Pro)'s at T / 2, where the largest group of texts is left out."""
    with np.load(here.place / "positions.npz") as arrays:
        groups, seeds = arrays["fox_pro_seed0/groups"], here.study["models"]["fox_pro"]["seeds"]
        apart_SNO = np.stack([arrays[f"mamba2_seed{s}/octaves"] - arrays[f"fox_pro_seed{s}/octaves"] for s in seeds])
        length = arrays["fox_pro_seed0"].size
    octave = position_loss.octave_edges(length).index(here.study["models"]["fox_pro"]["train_length"] // 2)
    change_SN = apart_SNO[:, :, octave] - apart_SNO[:, :, octave - 1]
    kept = groups != np.bincount(groups).argmax()
    return statistics.with_texts_and_seeds(change_SN[:, kept], groups[kept])[0].text()


def against_shorter(here: StudyNumbers, short: StudyNumbers) -> dict[str, str]:
    """How much better models are here after the tokens of the shorter runs, and what their schedule has to do with
    FoX (Pro)'s leads.
    """
    end = _budget(short)
    gains = [mean(short.study["models"][name]["heldout_loss"]) - here.over_training(name)[end] for name in MODELS]

    def share(model: str) -> str:
        """What of the change between the ends of both studies is there at equal tokens."""
        before, after = _end(short, model, "fox_pro"), _end(here, model, "fox_pro")
        return f"{100 * (before - _during(here, model, 'fox_pro')[end]) / (before - after):.0f} %"

    return {
        "better_least": f"{min(gains):.2f}",
        "better_most": f"{max(gains):.2f}",
        "share_transformer_pro": share("transformer_pro"),
        "share_fox_llama": share("fox_llama"),
    }


def over_training(here: StudyNumbers) -> str:
    """How far models are above others during training; a row for each pair."""
    during = {pair: _during(here, *pair) for pair in PAIRS}
    tokens = [*during[PAIRS[0]]]
    shown = [tokens[0], *tokens[1::2]]
    rows = [[_pair(here, pair), *(f"{apart[after]:+.2f}" for after in shown)] for pair, apart in during.items()]
    return markdown_table(["after", *(f"{after / 1e6:.1f}M" for after in shown)], rows, "l" + "r" * len(shown))


def earlier(here: StudyNumbers, short: StudyNumbers, one_seed: StudyNumbers) -> str:
    """The same differences in two other studies, and at the number of tokens at which the shorter one ends."""
    end = _budget(short)
    rows = [
        [
            _pair(here, pair),
            f"{_end(one_seed, *pair):.2f}",
            f"{_end(short, *pair):.2f}",
            f"{_during(here, *pair)[end]:.2f}",
            f"{_end(here, *pair):.2f}",
        ]
        for pair in PAIRS
    ]
    header = [
        "", "one seed, another corpus, 100.7M tokens", f"three seeds, {end / 1e6:.1f}M tokens",
        f"these runs after {end / 1e6:.1f}M tokens", "these runs at the end",
    ]  # fmt: skip
    return markdown_table(header, rows, "lrrrr")


def _pair(here: StudyNumbers, pair: tuple[str, str]) -> str:
    return " above ".join(display_name(here.study, name) for name in pair)


def _budget(of_study: StudyNumbers) -> int:
    """Training tokens of its runs."""
    return of_study.study["models"]["fox_pro"]["budget"]


def _during(of_study: StudyNumbers, model: str, other: str) -> dict[int, float]:
    """How far a model is above another one after so many tokens, mean of the seeds."""
    others = of_study.over_training(other)
    return {tokens: loss - others[tokens] for tokens, loss in of_study.over_training(model).items()}


def _end(of_study: StudyNumbers, model: str, other: str) -> float:
    """How far a model ends above another one, mean of the seeds."""
    return mean(of_study.apart(model, other))
