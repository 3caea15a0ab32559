"""Our own results: studies of several models, and how their numbers are made and shown.

A package beside the library, which imports it and is imported by nothing in it. A YAML (engine/plan.py) says what a
study compares, trains and claims.

    run.py         trains and evaluates the models of a study, stage by stage
    report.py      makes JSON, figures and tables of what was trained
    pages.py       fills measured numbers into the pages of the documentation
    code_tasks.py  makes downstream tasks of held-out code
    adding_gates.py  gives pretrained Transformers forget gates and trains them on; adding_gates_page.py: its page

Experiments that only studies use lie in configs/, which `train.py --config-dir studies/configs` adds to the others.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Adds studies/configs to Hydra's search path, as --config-dir does, among the overrides of a run.
SEARCH_PATH = f"hydra.searchpath=['file://{ROOT / 'studies' / 'configs'}']"
