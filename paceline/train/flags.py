"""Flags of `paceline train`, a group for each kind of head. Defaults are those of train/options.py."""

from __future__ import annotations

from paceline.terminal.flags import Flag, Group, by_topic, having

ANSWERS: Group = (
    Flag("temperatures", str, "0,0.8", "Sampling temperatures; each prompt is answered once at each."),
    Flag("max_prompt_tokens", int, 512, "Longer prompts are skipped."),
    Flag("max_tokens", int, 384, "Maximum tokens per answer."),
    Flag(
        "self_written",
        int | None,
        None,
        "Number of prompts that the model writes itself. Default: 2000 without --data, else 0.",
    ),
)
SEED: Group = (Flag("seed", int, 0, "The same seed gives the same answers and weights."),)
TRAINING: Group = (
    Flag("epochs", int, 3, "Passes over all answers."),
    Flag("max_steps", int | None, None, "Number of optimizer steps, instead of epochs."),
    Flag("max_epochs", int | None, None, "With --minutes: passes over all answers, at most."),
    Flag(
        "minutes",
        float | None,
        None,
        "Minutes for the whole command, instead of epochs: a third at most for answering, then training, and "
        "15 % at the end for measuring.",
    ),
    Flag("step_decay", float, 0.8, "Loss weight of each drafted token, relative to the one before."),
    Flag(
        "loss",
        str,
        "kl",
        "Loss: kl; ce, the cross-entropy with the answered token (DFlash's); lk, which adds the overlap of "
        "distributions, for temperatures around 1; or l1, DSpark's.",
    ),
    Flag("draft_vocab_size", int, 8192, "Tokens that the head can predict: the most frequent ones."),
    Flag(
        "batch_tokens",
        int | None,
        None,
        "Tokens per step, at most. Default: 512 to 8192, by the speed of a first step.",
    ),
    Flag(
        "weights",
        str,
        "",
        "How often an epoch has the examples of a segment, such as chat=2,code=0.5. Others: once.",
    ),
    Flag("max_length", int, 1024, "Tokens per example; longer ones are trained on in parts that overlap."),
    Flag("learning_rate", float, 5e-4, "Maximum learning rate, after the warm-up."),
    Flag("warmup_steps", int, 100, "Steps until the maximum learning rate."),
    Flag("clip", float, 1.0, "Maximum norm of the gradient."),
    Flag("held_out", float, 0.02, "Fraction of the prompts held out for evaluation."),
    Flag(
        "average",
        float,
        0.0,
        "Write an exponential moving average of the weights with this decay per step. 0: the last weights.",
    ),
    Flag(
        "checks",
        int,
        8,
        "How often acceptance on held-out answers is measured; the weights that accept most are written. 0: "
        "the last ones.",
    ),
    Flag(
        "round_weights",
        bool,
        False,
        "Round matrices to 4 bits in the second half of training, for a head that is served so.",
        "--round-weights/--no-round-weights",
    ),
    Flag(
        "keep_states",
        float,
        0.0,
        "GB of memory for the target's states, which later epochs then need not compute again.",
    ),
    Flag("checkpoint_every", int, 500, "Steps between two checkpoints; after 5 minutes in any case."),
)
ANSWERS = by_topic(ANSWERS, {"Answers": "temperatures max_prompt_tokens max_tokens self_written"})
TRAINING = by_topic(
    TRAINING,
    {
        "Optimizer": "batch_tokens max_length weights learning_rate warmup_steps clip average held_out "
        "checks round_weights keep_states checkpoint_every",
        "Loss": "step_decay loss",
    },
)
EAGLE3: Group = (
    *TRAINING,
    Flag("unroll", int, 5, "Number of drafted tokens per position in training."),
    Flag("intermediate_size", int | None, None, "Size of the head's MLP. Default: the target's."),
    Flag("fc_norm", bool, True, "EAGLE-3.1: one norm per feature.", "--fc-norm/--no-fc-norm"),
    Flag(
        "norm_output",
        bool,
        True,
        "EAGLE-3.1: feed the normalized state back.",
        "--norm-output/--no-norm-output",
    ),
)
P_EAGLE: Group = (
    *(flag for flag in EAGLE3 if flag.name != "norm_output"),
    Flag("layers", int, 4, "Layers of the head."),
)
MEDUSA: Group = (
    *having(TRAINING, learning_rate=1e-3),
    Flag("heads", int, 5, "Number of heads; each predicts one token further ahead."),
    Flag("layers", int, 1, "Residual blocks per head."),
)
BLOCK: Group = (
    *having(TRAINING, step_decay=0.78, average=0.999),
    Flag("layers", int, 5, "Layers of the head."),
    Flag("block_size", int, 8, "Slots of a block, the last known token included."),
    Flag("features", int, 5, "Hidden states of the target that the head reads."),
    Flag("anchors", float, 0.25, "Blocks in training per answered token."),
    Flag(
        "weighting",
        str,
        "decay",
        "Loss weights of drafted tokens: decay, by --step-decay; d-pace, by the head's own chances.",
    ),
    Flag("intermediate_size", int | None, None, "Size of the head's MLPs. Default: the target's."),
    Flag("fc_norm", bool, True, "One norm per feature, as in EAGLE-3.1.", "--fc-norm/--no-fc-norm"),
)
BLOCK = by_topic(
    BLOCK,
    {
        "Head": "draft_vocab_size layers block_size features intermediate_size fc_norm anchors",
        "Loss": "weighting",
    },
)
DFLASH2: Group = (
    *having(BLOCK, loss="ce"),
    *by_topic(
        (
            Flag("convolution_group", int, 16, "Channels that share a correction of the convolutions."),
            Flag("selector_rank", int, 256, "Rank of the selector."),
            Flag("selector_candidates", int, 16, "Best guesses of a slot that the selector chooses among."),
        ),
        {"Head": "convolution_group selector_rank selector_candidates"},
    ),
)
DSPARK: Group = (
    *having(BLOCK, loss="l1", block_size=7),
    *by_topic((Flag("markov_rank", int, 256, "Rank of the Markov head."),), {"Head": "markov_rank"}),
)
EAGLE3 = by_topic(EAGLE3, {"Head": "draft_vocab_size unroll intermediate_size fc_norm norm_output"})
P_EAGLE = by_topic(P_EAGLE, {"Head": "draft_vocab_size layers unroll intermediate_size fc_norm"})
MEDUSA = by_topic(MEDUSA, {"Head": "draft_vocab_size heads layers"})
