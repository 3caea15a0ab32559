"""Reads the folders of runs and evaluations, and shows them: numbers, tables, figures, one HTML page.

runs.py                one training run: its losses, norms, times, settings
scores_in_training.py  scores that callbacks logged in a run
evaluations.py         one evaluation: the schema that all of them write
position_loss.py       loss at every position: curves, slopes, comparisons sequence by sequence
published.py           the paper's tables
statistics.py          means over seeds with their intervals
comparisons.py         models compared at equal tokens and at equal FLOPs
tables.py              tables in Markdown and LaTeX
known_models.py        names of models, and their colours
outputs.py             output folders in which a command replaces only its own files
plots/                 the figures, a file per subject
run_figures.py         the figures of runs; page.py: one HTML page about runs and their evaluations

It imports neither models, training nor evaluations: results can be read on a machine that cannot train or evaluate.
"""

from forgetting_transformer.command_line import CommandError


class AnalysisError(CommandError, ValueError):
    """Results cannot be read or shown; the message names the file, the error and the fix."""
