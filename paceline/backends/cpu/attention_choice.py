"""Selects the attention implementation for this CPU. Both give the same bits."""

from paceline.backends.cpu.isa import ISA

if ISA.slow_half:
    from paceline.backends.cpu.attention_chunks import (
        RESULT_ROWS,
        TASK_HEADS,
        attend,
        rows_of_task,
        run_mix,
        run_score,
    )
else:
    from paceline.backends.cpu.attention import attend, rows_of_task
    from paceline.backends.cpu.attention_tiles import MAX_HEADS as TASK_HEADS
    from paceline.backends.cpu.attention_tiles import run_mix, run_score

    RESULT_ROWS = TASK_HEADS  # padded heads of scratch for `attend`, beside 64 bytes

__all__ = ["RESULT_ROWS", "TASK_HEADS", "attend", "rows_of_task", "run_mix", "run_score"]
