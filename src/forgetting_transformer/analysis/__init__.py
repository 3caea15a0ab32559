"""Reads what runs and evaluations left in their folders, and shows it: numbers, tables, figures, one HTML page.

runs.py         one training run: its losses, rates, norms, times, settings
statistics.py   means over seeds with their intervals
comparisons.py  models against each other at equal tokens and at equal FLOPs
studies.py      what came of a study of several models; study_tables.py: its tables
tables.py       tables of scores; markdown.py: other tables, and pages that are filled in
plots/          the figures, a file per subject
page.py         one HTML page about runs and their evaluations

It imports neither models, training nor evaluations: results can be read on a machine that cannot run what made them.
"""


class AnalysisError(ValueError):
    """Results cannot be read or shown as asked; the message names the file, what is wrong, and the fix."""
