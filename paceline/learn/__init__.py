"""Learning from live traffic: a draft head that trains on what the server answers.

folder.py      what is where in the folder of --learn-dir
rows.py        a finished request as it is kept
store.py       the rows on disk: bounded in bytes and age, safe against kills and damage
split.py       which rows train a head, and which judge it
"""
