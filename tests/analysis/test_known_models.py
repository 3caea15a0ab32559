"""Models are known by their labels, and a plug-in may add its own."""

from forgetting_transformer.analysis import known_models
from forgetting_transformer.analysis.plots.style import curve_styles


def test_the_longest_label_in_a_name_decides():
    for name in ("gated_delta_net", "demo_gated_delta_net_seed1", "Gated DeltaNet"):
        assert known_models.find(name).name == "Gated DeltaNet"
        assert curve_styles([name]) == curve_styles(["gated_delta_net"]) != curve_styles(["delta_net"])


def test_a_model_of_a_plug_in_has_a_style_by_its_name_or_of_its_choice(monkeypatch):
    assert known_models.find("my_retention") is None and len(curve_styles(["my_retention", "fox_pro"])) == 2
    monkeypatch.setitem(known_models.MODELS, "my_retention", known_models.KnownModel("RetNet", 9))
    assert curve_styles(["run of my_retention"]) == curve_styles(["transformer_swa"])


def test_released_models_are_called_as_in_the_paper(tmp_path):
    assert known_models.display_name("delta_net-760m-longcrawl64-48b") == "DeltaNet"
    assert known_models.display_name("fox_pro") == "fox_pro"
    for model in ("mine", "mamba2-760m-longcrawl64-48b", "fox-pro-760m-longcrawl64-48b"):
        (tmp_path / model).mkdir()
        (tmp_path / model / "results.json").touch()
    assert known_models.results_in(tmp_path, "results.json") == [
        f"FoX (Pro)={tmp_path}/fox-pro-760m-longcrawl64-48b",
        f"Mamba-2={tmp_path}/mamba2-760m-longcrawl64-48b",
        f"{tmp_path}/mine",
    ]
