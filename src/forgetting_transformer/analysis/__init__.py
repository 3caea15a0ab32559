"""Reads what runs and evaluations left in their folders, and shows it: numbers, tables, figures, one HTML page.

runs.py           one training run: its losses, rates, norms, times, settings
evaluations.py    one evaluation: the schema that all of them write, and the files of earlier versions as the same
position_loss.py  loss at every position: curves, slopes, comparisons sequence by sequence
needles.py        grids of needle in a haystack
question_scores.py  two models on the same questions
published.py      the columns of the paper's tables
known_models.py   what models are called, and their colours
statistics.py     means over seeds with their intervals
comparisons.py    models against each other at equal tokens and at equal FLOPs
tables.py         tables in Markdown and LaTeX
conditions.py     under which conditions runs were made; plots/: the figures, a file per subject
page.py           one HTML page about runs and their evaluations

It imports neither models, training nor evaluations: results can be read on a machine that cannot run what made them.
"""


class AnalysisError(ValueError):
    """Results cannot be read or shown as asked; the message names the file, what is wrong, and the fix."""
