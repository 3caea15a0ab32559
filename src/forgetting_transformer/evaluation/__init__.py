"""Evaluations of trained models. The scripts under eval/ are their command lines.

per_token_loss.py  loss at every position
forget_gates.py    forget-gate and attention maps, memory lengths; the callback gate_statistics
needle.py          needle in a haystack, with our prompts and the paper's, and its four commands; the callback needle
harness.py         lm-evaluation-harness; lm_eval_callback.py: the callback lm_eval
longbench.py       LongBench

models.py          loading a run, an export or a model of the hub
held_out.py        held-out sequences of a corpus
generation.py      greedy continuations in files that a later start completes
workers.py         processes of an evaluation; start and end of its script; options.py: common options
in_training.py     shared parts of callbacks that evaluate the model in training
"""
