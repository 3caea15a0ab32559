"""Pages whose tables and numbers come from files: what stands between marks is replaced."""

import re
from collections.abc import Mapping

from forgetting_transformer.analysis import AnalysisError

#: A table stands on separate lines between <!-- NAME --> and <!-- end of NAME -->, a number in a sentence between
#: <!-- NAME --> and <!-- end -->.
_MARKED = re.compile(r"<!-- (\w+) -->(?:\n.*?<!-- end of \1 -->|[^\n]*?<!-- end -->)", re.DOTALL)
_MARK = re.compile(r"<!-- (?:end|end of \w+|\w+) -->")


def fill_in(page: str, sections: Mapping[str, str]) -> str:
    """A page in which what stands between marks is replaced by the section of that name.

    Args:
        page: Markdown with marks, `<!-- NAME -->` and `<!-- end of NAME -->` around lines, `<!-- NAME -->` and `<!--
            end -->` within a line.
        sections: tables and numbers by name.

    Raises:
        AnalysisError: the page has marks for a section that is not there, or a mark without the one that ends it.
    """

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        if name not in sections:
            raise AnalysisError(
                f"the page wants {name!r}, and there is no such section; there are {', '.join(sections)}"
            )
        text = sections[name].strip()
        if match[0].endswith("<!-- end -->"):
            return f"<!-- {name} -->{text}<!-- end -->"
        return f"<!-- {name} -->\n{text}\n<!-- end of {name} -->"

    if unpaired := _MARK.search(_MARKED.sub("", page)):
        raise AnalysisError(f"the mark {unpaired[0]} has no other one to pair with")
    return _MARKED.sub(replace, page)
