"""Training a draft head on the target's own answers.

rows.py           JSON rows from files that may be large or damaged
prompts.py        prompts from request logs; bad rows are counted and skipped
self_prompts.py   prompts that the model writes itself, if there is no such file
answers.py        the target answers prompts, into a file that can be resumed and moved
examples.py       that file: token ids, and where the answer begins
sampler.py        many answers at once in torch, for a GPU
sequences.py      the target over whole sequences: the features that a head learns from
losses.py         distance between the head's and the target's distributions
acceptance.py     replayed chains: how many of a head's guesses the answers on record accept
objective.py      the protocol of a trainable head: eagle3_objective.py, medusa.py
eagle3.py         the draft steps of an EAGLE-3 head, unrolled over every slot at once
checks.py         which weights of a run are written: the ones that accept most
trainer.py        the loop: batches, optimizer, checkpoints, exact resume
evaluation.py     acceptance of the head in the engine
job.py            all of it in sequence
"""
