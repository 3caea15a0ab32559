"""Evaluations of trained models. The scripts under eval/ are their command lines.

per_token_loss.py  loss at every position
forget_gates.py    forget-gate and attention maps, memory lengths
niah.py            needle in a haystack, with our prompts and the paper's; niah_steps.py: the paper's four commands
harness.py         lm-evaluation-harness
longbench.py       LongBench

models.py          loading a run, an export or a model of the hub
held_out.py        held-out sequences of a corpus
texts.py           texts as token ids; generation.py: greedy continuations, and files that a later start continues
workers.py         the processes that share an evaluation, and how its script ends; options.py: its common options
official.py        names of the models that the paper's authors have released
in_training.py     what callbacks share that evaluate the model in training: gate_statistics.py, lm_eval_callback.py,
                   needle_callback.py, samples.py
"""
