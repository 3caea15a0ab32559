"""Pages are filled in between marks and left alone elsewhere; marks that do not fit are errors."""

import pytest

from forgetting_transformer.analysis import AnalysisError
from studies.engine.marked_pages import fill_in

PAGE = """a
<!-- models -->
old
<!-- end of models -->
at <!-- speed -->1<!-- end --> tokens/s and <!-- loss --><!-- end --> nats <!-- a remark of several words -->
"""


def test_only_what_is_between_marks_of_a_page_is_replaced():
    sections = {"models": "| new |\n", "speed": "2", "loss": "3"}
    filled = fill_in(PAGE, sections)
    assert filled == PAGE.replace("old", "| new |").replace(">1<", ">2<").replace("--><!-- end", "-->3<!-- end")
    assert fill_in(filled, sections) == filled


def test_a_mark_without_a_section_is_an_error():
    with pytest.raises(AnalysisError, match="wants 'loss', and there is no such section; there are models, speed"):
        fill_in(PAGE, {"models": "", "speed": ""})


@pytest.mark.parametrize(
    "page",
    [
        "<!-- models -->\ntable\n",
        "table\n<!-- end of models -->\n",
        "<!-- models -->\ntable\n<!-- end of model -->\n",
        "at <!-- models -->1\n<!-- end --> tokens/s",
        "at 1<!-- end --> tokens/s",
    ],
)
def test_a_mark_without_its_other_one_is_an_error(page):
    with pytest.raises(AnalysisError, match="has no other one to pair with"):
        fill_in(page, {"models": "1"})
