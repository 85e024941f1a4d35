"""Learning from live traffic: a draft head that trains on what the server answers.

data/
    folder.py      the files in the folder of --learn-dir
    rows.py        a finished request as it is stored
    store.py       the rows on disk: bounded in bytes and age, safe against kills and damage
    split.py       which rows train a head, and which judge it
    collector.py   from finished requests to rows, in a separate thread
    selection.py   which rows are trained on: new ones, and old ones against forgetting
training/
    fine_tune.py   from rows and a head to a candidate
    early_stop.py  the weights that guess held-back answers best
    objectives.py  the training objective of each kind of head
    yielding.py    waits while the server is busy
    limits.py      the share of a GPU's memory and time that the trainer may use
    report.py      what `paceline learn train` prints
evaluation/
    score.py       held-back rows drafted again, with the current head and a candidate
    gate.py        whether the candidate gains, by these scores
    trial.py       whether it gains on live traffic: the two heads take turns
    history.py     the heads that have served, and which one serves
activity.py        memory that server and trainer share: who computes when
slowdown.py        what the trainer costs the server
jobs.py            training and scoring as child processes of a server
learner.py         the loop over all of these, while the server serves; status.py: its state
commands.py, head_commands.py, options.py
"""
