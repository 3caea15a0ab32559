"""Faults of a run, and where each is handled. docs/operations.md describes them, tests/FAULTS.md names the tests.

 1  signal                                 watchdog.py hears it, stop.py lets all ranks stop after the same step
 2  killed rank                            peers.py names it
 3  hung rank                              watchdog.py notices it
 4  loss or gradient not finite            step_guard.py leaves the step out
 5  full disk at a save                    ../saving.py and ../checkpoint/ do without it; status.json is written anyway
 6  damaged checkpoint                     ../checkpoint/ takes the one before
 7  missing or damaged data                data/
 8  reader dead, silent or without memory  ../feed.py starts new ones; watchdog.py; data/worker.py
 9  changed config or corpus at resume     ../config/continuing.py
10  ranks that differ                      corruption.py compares them
11  two starts in one folder               ../records/run_directory.py has the lock
12  network that goes away                 data/storage/remote.py; ../callbacks/wandb.py

failures.py ends a run in one line after any error.
"""
