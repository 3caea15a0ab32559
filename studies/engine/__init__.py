"""The engine of studies, which their commands and pages share.

plan.py     the YAML of a study
queue.py    searches of all models, then their runs and variants
stages.py   corpus, training, evaluations and report, one after another on all GPUs
results.py  the numbers of a study, as one small JSON file
scores.py   needle in a haystack, and the next line of code
claims.py   the rules and verdicts of claims
tables.py   tables, and the sections of a page
noise.py    intervals over seeds for several models at once
figures.py  octaves of positions, and differences to the baseline
"""
