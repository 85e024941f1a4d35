"""Training a draft head on the target's own answers.

commands.py, flags.py     the `paceline train` commands and their flags
options.py                what a training run can be given, one class for each kind of head
job.py                    a whole command: answer, train, measure, write, report
run.py                    train_head: from files of answers to a trained head
disk.py                   write errors as messages with a remedy
data/                     prompts, and the target's answers to them
objectives/               what each kind of head learns: its forward pass in training, its loss
loop/                     batches, the target's states, acceptance, checkpoints, exact resume
report/                   progress, evaluation in the engine, plot, model card
plan/                     `paceline train plan`: predicts what a head would be worth from short pilot runs
"""
