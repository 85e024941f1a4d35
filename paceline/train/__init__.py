"""Training a draft head on the target's own answers.

Prompts and answers
    rows.py, prompts.py       prompts from request logs; bad rows are counted and skipped
    self_prompts.py           prompts that the model writes itself
    answers.py                the target answers prompts in batches; make_answers.py: into a file
    examples.py               that file: token ids, and where the answer begins

What a head learns from
    sequences.py              the target over whole sequences: hidden states and next tokens prefix_cache.py
    common starts of prompts computed once; state_cache.py: states kept between epochs batches.py
    examples of similar length as padded batches

Heads in training
    objective.py              the protocol: eagle3_objective.py, block_objective.py, medusa.py eagle3.py,
    block.py       drafts unrolled over all slots, or blocks at random anchors; unrolled_attention.py
    new_head.py               the head that training starts from losses.py                 distance between
    the head's and the target's distributions acceptance.py             replayed chains: how many guesses the
    recorded answers accept

The run
    trainer.py                the loop: batches, optimizer, checkpoints, exact resume; progress.py: its state
    processes.py              one or several processes (torchrun) checks.py, average.py     which weights are
    written rounding.py               training for 4-bit weights evaluation.py             acceptance of the
    head in the engine run.py, job.py            all of it in sequence; options.py, commands.py, show.py,
    card.py, plot.py, disk.py plan/                     `paceline train plan`
"""
