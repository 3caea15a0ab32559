"""Reads what runs and evaluations left in their folders, and shows it: numbers, tables, figures, one HTML page.

runs.py         the metrics of one run, line by line; results.py: one run as a sweep or a comparison needs it
statistics.py   means over seeds with their intervals
comparisons.py  models against each other at equal tokens and at equal FLOPs
studies.py      what came of a study of several models; study_tables.py: its tables
tables.py       tables of scores; markdown.py: other tables, and pages that are filled in
plots/          the figures, a file per subject
page.py         one HTML page about runs and their evaluations
"""
