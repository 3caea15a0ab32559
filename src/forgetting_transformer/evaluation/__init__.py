"""Evaluations of trained models. The scripts under eval/ are their command lines.

per_token_loss.py  loss at every position
forget_gates.py    forget-gate and attention maps, memory lengths; the callback gate_statistics
needle.py          needle in a haystack, with our prompts and the paper's, and its four commands; the callback needle
harness.py         lm-evaluation-harness; lm_eval_callback.py: the callback lm_eval
longbench.py       LongBench

models.py          loading a run, an export or a model of the hub
held_out.py        held-out sequences of a corpus
generation.py      greedy continuations, and files that a later start continues
workers.py         the processes that share an evaluation, and how its script ends; options.py: its common options
in_training.py     what callbacks share that evaluate the model in training
"""
