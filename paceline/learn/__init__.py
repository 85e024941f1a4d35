"""Learning from live traffic: a draft head that trains on what the server answers.

folder.py      what is where in the folder of --learn-dir
rows.py        a finished request as it is kept
store.py       the rows on disk: bounded in bytes and age, safe against kills and damage
split.py       which rows train a head, and which judge it
collector.py   from finished requests to rows, in a thread of its own
selection.py   which rows are trained on: new ones, and old ones against forgetting
fine_tune.py   from rows and a head to a candidate; early_stop.py, yielding.py, limits.py, objectives.py
score.py       held-back rows drafted again, with the present head and a candidate
gate.py        whether the candidate gains, by these scores
trial.py       the same by live steps, in turns
history.py     the heads that have served, and which one serves
activity.py    what a server and its trainer tell each other while both run; slowdown.py: what that costs
jobs.py        training and scoring as processes of a server
learner.py     the loop over all of these, beside a server that serves
"""
