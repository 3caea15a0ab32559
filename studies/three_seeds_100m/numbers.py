"""Numbers and tables of README.md from study.json and those of other studies; scripts/pages.py puts them there."""

from pathlib import Path
from statistics import mean

from forgetting_transformer.analysis import statistics, study_tables
from forgetting_transformer.analysis.studies import contrasts, differences, display_name, losses_by_seed
from forgetting_transformer.analysis.study_numbers import StudyNumbers, in_words
from forgetting_transformer.analysis.tables import markdown_table

MODELS = ("fox_pro", "fox_llama", "transformer_pro", "transformer_llama", "mamba2", "hgrn2", "delta_net")
RECURRENT = ("mamba2", "hgrn2", "delta_net")
FOX = ("fox_pro", "fox_llama")
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
    found = numbers(folder) | needles(here) | against_shorter(here, short)
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
    """How many answers of a model find the needle, and the most words of other answers."""

    def words(model: str, *modes: str) -> list[int]:
        both = [here.answers(model, mode, beyond) for mode in modes for beyond in (False, True)]
        return [answer.words for some in both for answer in some]

    of_llama, of_fox = words("transformer_llama", "easy"), here.answers("fox_pro", "easy", beyond=False)
    found = {
        "exact_fox_pro_easy_inside": str(sum(answer.exact for answer in of_fox)),
        "words_recurrent": str(max(max(words(name, "standard", "easy")) for name in RECURRENT)),
        "words_fox_pro": str(max(words("fox_pro", "standard"))),
        "words_transformer_llama": str(max(of_llama)),
        "most_transformer_llama": str(of_llama.count(max(of_llama))),
    }
    for model in ("fox_pro", "fox_llama", "transformer_pro"):
        for mode in ("standard", "easy"):
            for where in ("inside", "beyond"):
                answers = here.answers(model, mode, where == "beyond")
                found[f"found_{model}_{mode}_{where}"] = str(sum(answer.found for answer in answers))
    return found


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
