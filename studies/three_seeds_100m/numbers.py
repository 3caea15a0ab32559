"""Numbers and tables of README.md from study.json and those of other studies; scripts/pages.py puts them there."""

from pathlib import Path
from statistics import mean, stdev

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
#: Words of the needle, and those of an answer that has found it.
WORDS, FOUND = 12, 10


def sections(folder: Path) -> dict[str, str]:
    """What stands between the marks of README.md; `folder` is this study's."""
    found = numbers(folder) | needles(folder) | {"over_training": over_training(folder), "earlier": earlier(folder)}
    return found | study_tables.sections(folder, folder / "README.md")


def numbers(folder: Path) -> dict[str, str]:
    """Those of the sentences, some of which README.md of the project has too."""
    of_study = StudyNumbers.read(folder, models=MODELS)
    study, heads = of_study.study, of_study.of_heads
    found = differences(contrasts(study, "models"))
    losses = {name: losses_by_seed(study["models"][name]) for name in MODELS}
    flops = {name: study["models"][name]["flops_per_token"] for name in MODELS}
    recurrent = sorted(found[name].value for name in RECURRENT)

    def claimed(beginning: str, model: str) -> str:
        return of_study.claimed(beginning, model).removeprefix("+")

    def faster(name: str) -> str:
        """What pruning gains, mean of the seeds."""
        speeds = study["pruning_speed"][name]
        gains = [one / other - 1 for one, other in zip(speeds["pruned"], speeds["unpruned"], strict=True)]
        return f"{100 * mean(gains):.0f} %"

    return {
        "pro_gain": found["transformer_pro"].text(),
        "llama_gain": claimed("FoX is better than the Transformer", "transformer_llama"),
        "behind_least": f"{recurrent[0]:.2f}",
        "behind_most": f"{recurrent[-1]:.2f}",
        "pro_parts": f"{found['fox_llama'].value:.2f}",
        "pro_parts_transformer": f"{float(claimed('the Pro', 'transformer_llama').split()[0]):.2f}",
        "below_fox_llama": in_words(of_study.apart("fox_llama", "transformer_pro")),
        "flattens_mamba2": claimed("the loss of recurrent models flattens", "mamba2"),
        **{f"seeds_{name}": in_words([of[seed] for seed in sorted(of)]) for name, of in losses.items()},
        "pro_pairs": in_words(of_study.apart("transformer_pro", "fox_pro")),
        "llama_pairs": in_words(of_study.apart("transformer_llama", "fox_llama")),
        "deviation_fox_pro": f"{stdev(losses['fox_pro'].values()):.3f}",
        "bartlett": f"{statistics.equal_noise([[*of.values()] for of in losses.values()]):.2f}",
        "longer_gain": f"{_end(folder.parent / 'longer_sequences', 'transformer_pro', 'fox_pro'):.3f}",
        **{f"beyond_{name}": f"{of_study.beyond(name):+.2f}" for name in MODELS},
        **{f"faster_{name}": faster(name) for name in FOX},
        **{f"global_{name}": f"{100 * heads(name, -1, 'global'):.1f} %" for name in FOX},
        **{f"longest_first_{name}": f"{heads(name, 0, 'longest'):,.0f}" for name in FOX},
        **{f"longest_last_{name}": f"{heads(name, -1, 'longest'):,.0f}" for name in FOX},
        **{f"pruned_first_{name}": f"{100 * heads(name, 0, 'pruned'):.0f} %" for name in FOX},
        **{f"pruned_last_{name}": f"{100 * heads(name, -1, 'pruned'):.0f} %" for name in FOX},
        **{f"flops_{name}": f"{flops[name] / 1e6:.0f}" for name in ("fox_pro", *RECURRENT)},
    }


def needles(folder: Path) -> dict[str, str]:
    """How many answers of a model find the needle, or are it word for word, and the most words of other answers."""
    of_study = StudyNumbers.read(folder)

    def most(model: str, *modes: str) -> int:
        """Words of the needle that an answer has."""
        answers = [of_study.answers(model, mode, beyond) for mode in modes for beyond in (False, True)]
        return max(round(WORDS * answer.words) for some in answers for answer in some)

    found = {
        "words_recurrent": str(max(most(name, "standard", "easy") for name in RECURRENT)),
        "words_fox_pro": str(most("fox_pro", "standard")),
        "words_transformer_llama": str(most("transformer_llama", "easy")),
    }
    for model in ("fox_pro", "fox_llama", "transformer_pro"):
        for mode in ("standard", "easy"):
            for where in ("inside", "beyond"):
                answers = of_study.answers(model, mode, where == "beyond")
                case = f"{model}_{mode}_{where}"
                found[f"exact_{case}"] = str(sum(answer.exact for answer in answers))
                found[f"found_{case}"] = str(sum(round(WORDS * answer.words) >= FOUND for answer in answers))
    return found


def over_training(folder: Path) -> str:
    """How far models are above FoX during training; a row for each pair."""
    of_study = StudyNumbers.read(folder)
    curves = {name: of_study.over_training(name) for name in MODELS}
    tokens = [*curves["fox_pro"]]
    shown = [tokens[0], *tokens[1::2]]
    rows = [
        [_pair(of_study, pair), *(f"{curves[pair[0]][after] - curves[pair[1]][after]:+.2f}" for after in shown)]
        for pair in PAIRS
    ]
    return markdown_table(["after", *(f"{after / 1e6:.1f}M" for after in shown)], rows, "l" + "r" * len(shown))


def earlier(folder: Path) -> str:
    """The same differences in two other studies, and at the number of tokens at which the shorter one ends."""
    of_study, short = StudyNumbers.read(folder), StudyNumbers.read(folder.parent / "three_seeds")
    curves = {name: of_study.over_training(name) for name in MODELS}
    end = short.study["models"]["fox_pro"]["budget"]
    rows = [
        [
            _pair(of_study, pair),
            f"{_end(folder.parent / 'seven_models', *pair):.2f}",
            f"{_end(short.place, *pair):.2f}",
            f"{curves[pair[0]][end] - curves[pair[1]][end]:.2f}",
            f"{_end(folder, *pair):.2f}",
        ]
        for pair in PAIRS
    ]
    header = [
        "", "one seed, another corpus, 100.7M tokens", f"three seeds, {end / 1e6:.1f}M tokens",
        f"these runs after {end / 1e6:.1f}M tokens", "these runs at the end",
    ]  # fmt: skip
    return markdown_table(header, rows, "lrrrr")


def _pair(of_study: StudyNumbers, pair: tuple[str, str]) -> str:
    return " above ".join(display_name(of_study.study, name) for name in pair)


def _end(folder: Path, model: str, other: str) -> float:
    """How far a model of a study ends above another one, mean of the seeds."""
    return mean(StudyNumbers.read(folder, models=(model, other)).apart(model, other))
