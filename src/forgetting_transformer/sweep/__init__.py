"""Many runs as one experiment: start them, search a learning rate with them. docs/sweep.md shows how.

jobs.py       a job is one run of train.py with its overrides, in separate processes
machines.py   where jobs run: the GPUs of this node, or SLURM
runner.py     runs a list of jobs, reports each, survives the failure of any
study.py      searches and runs of several models in one queue

What came of them is read and shown by analysis/.
"""


class SweepError(ValueError):
    """A sweep cannot be run or read as asked; the message names what is wrong and the fix."""
