"""Imports of the package run one way: low layers know nothing of what is built on them."""

import ast
from pathlib import Path

import forgetting_transformer

PACKAGE = Path(forgetting_transformer.__file__).parent
NAME = "forgetting_transformer"
#: Folder -> the folders that it must not import, at the top of a file or later.
FORBIDDEN = {
    "ops": {"model", "data", "analysis", "training", "evaluation", "sweep"},
    "model": {"data", "analysis", "training", "evaluation", "sweep"},
    "data": {"ops", "model", "analysis", "training", "evaluation", "sweep"},
    "analysis": {"ops", "model", "data", "training", "evaluation", "sweep"},
    "training": {"evaluation", "sweep"},
    "evaluation": {"sweep"},
    "sweep": {"evaluation"},
}


def imported(file: Path) -> set[tuple[str, int]]:
    """Parts of the package that a file imports anywhere, and the line; imports for type checkers do not count."""
    found = set()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = "" if not node.level else f"{'.'.join(file.relative_to(PACKAGE.parent).parts[: -node.level])}."
            module = f"{prefix}{node.module or ''}".rstrip(".")
            modules = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        parts = (module.split(".") for module in modules)
        found |= {(part[1], node.lineno) for part in parts if part[0] == NAME and len(part) > 1}
    return found


def test_no_import_points_up():
    wrong = [
        f"{file.relative_to(PACKAGE)}, line {line}: {layer} imports {other}"
        for layer, above in FORBIDDEN.items()
        for file in sorted((PACKAGE / layer).rglob("*.py"))
        for other, line in sorted(imported(file))
        if other in above
    ]
    assert not wrong, "\n".join(wrong)


#: Packages that only an extra other than `train` brings, and the files that are imported where one is used.
OF_EXTRAS = {"datasets", "datasketch", "httpx", "lm_eval", "optuna", "pyarrow", "rouge", "wandb"}
USED_ALONE = {"evaluation/harness.py", "sweep/free_search.py"}


def test_packages_of_extras_are_imported_where_they_are_used():
    """Training with `callbacks=[needle]`, say, needs no package that only its script's judge needs."""
    wrong = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if {module.partition(".")[0] for module in modules} & OF_EXTRAS:
                wrong.append(str(file.relative_to(PACKAGE)))
    assert {*wrong} <= USED_ALONE, wrong
