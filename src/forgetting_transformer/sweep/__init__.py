"""Many runs as one experiment: start them, search with them. docs/sweep.md shows how.

jobs.py           a job: one run of train.py with its overrides, or another command, in its own processes
runner.py         runs jobs on the GPUs of this machine, reports each, and continues after failures
learning_rate.py  the paper's search
free_search.py    Optuna's search over any keys
state.py          settings that all runs of a search share

The launcher of `train.py -m` is in src/hydra_plugins/, where Hydra looks for it. analysis/ reads and shows the results
of runs.
"""

from forgetting_transformer.command_line import CommandError


class SweepError(CommandError, ValueError):
    """A sweep cannot be run or read; the message has cause and fix."""
