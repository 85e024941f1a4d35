"""Training a draft head on the target's own answers.

rows.py           JSON out of files that may be large or damaged
prompts.py        what users asked: read from files of requests, bad rows counted and left out
self_prompts.py   prompts that the model writes itself, where there is no such file
answers.py        the target answers prompts, into a file that can be resumed and carried elsewhere
examples.py       that file: token ids, and where the answer begins
sampler.py        many answers at once, by torch, for a GPU
sequences.py      the target over whole sequences: the features a head learns from
losses.py         how far guesses are from what the target says
objective.py      what can be trained: eagle3_objective.py, medusa.py
eagle3.py         the steps of an EAGLE-3 head, unrolled over every slot at once
trainer.py        the loop: batches, optimizer, checkpoints, exact resume
evaluation.py     what the head is worth in the engine
job.py            all of it, one after the other
"""
