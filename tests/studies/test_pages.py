"""studies/pages.py: what pages say of measurements is what files in the repository say."""

import json
import re
from pathlib import Path

import pytest

from forgetting_transformer.analysis import AnalysisError
from studies import pages

ROOT = Path(__file__).parents[2]
EVERY = [
    ROOT / "README.md",
    *(page for folder in ("docs", "eval", "studies", "benchmarks") for page in ROOT.glob(f"{folder}/**/*.md")),
]
PAGES_WITH_MARKS = [
    page.relative_to(ROOT).as_posix() for page in EVERY if re.search(r"<!-- end\b", page.read_text(encoding="utf-8"))
]
RESULTS = [
    *ROOT.glob("benchmarks/results/*.json"),
    *ROOT.glob("studies/*/[!.]*.json"),
]
PAGE = """a
<!-- models -->
old
<!-- end of models -->
at <!-- speed -->1<!-- end --> tokens/s and <!-- loss --><!-- end --> nats <!-- a remark of several words -->
"""


@pytest.mark.slow
def test_pages_say_what_the_files_say(capsys):
    assert pages.main(["--check"]) == 0, capsys.readouterr().err
    assert sorted(pages.PAGES) == sorted(PAGES_WITH_MARKS)


def test_only_what_is_between_marks_of_a_page_is_replaced():
    sections = {"models": "| new |\n", "speed": "2", "loss": "3"}
    filled = pages.fill_in(PAGE, sections)
    assert filled == PAGE.replace("old", "| new |").replace(">1<", ">2<").replace("--><!-- end", "-->3<!-- end")
    assert pages.fill_in(filled, sections) == filled


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (PAGE, "wants 'speed', and there is no such section; there are models"),
        ("<!-- models -->\ntable\n<!-- end of model -->\n", "has no other one to pair with"),
        ("at 1<!-- end --> tokens/s", "has no other one to pair with"),
    ],
)
def test_a_mark_that_does_not_fit_is_an_error(page, message):
    with pytest.raises(AnalysisError, match=message):
        pages.fill_in(page, {"models": "1"})


def test_no_line_begins_with_a_number_in_marks():
    """Markdown would take the line for HTML, and show what else is on it as it is written."""
    for page in PAGES_WITH_MARKS:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not re.findall(r"^\s*(?:[-*] +)?<!-- \w+ -->.*<!-- end -->.*", text, re.MULTILINE), page


MEASURED = r"\d(?:[\d,.]*\d)?\s*(?:tokens/s|TFLOP/s|ms\b|µs|GB\b|nats|%|seconds|s\b|times\b)"


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_a_number_with_the_unit_of_a_measurement_is_in_marks(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- (\w+) -->(?:\n.*?<!-- end of \1 -->|[^\n]*?<!-- end -->)", "", text, flags=re.DOTALL)
    assert not re.findall(rf".*{MEASURED}.*", text)


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_a_file_of_results_says_how_it_was_made_and_names_no_machine(file):
    text = file.read_text(encoding="utf-8")
    content = json.loads(text)
    place = content["environment"]
    assert place["versions"] is not None and (place.get("hardware") or place.get("machine"))
    assert re.match(r"20\d\d-\d\d-\d\d", place.get("date") or content["started"])
    # What a benchmark wrote knows its commit (BENCHMARK_COMMIT says it in a copy without .git); else `source` tells.
    assert place["commit"] or "source" in content
    assert not re.search(r"(?<![\w.…])/(?:tmp|root|home|work|mnt|var)/", text) and '"host":' not in text


def test_pages_show_no_figures_that_are_not_there():
    for page in EVERY:
        for image in re.findall(r"!\[[^\]]*\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / image).is_file(), f"{page} shows {image}"
