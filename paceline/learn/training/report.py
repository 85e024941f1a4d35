"""What `paceline learn train` prints: lines for a person, or JSON for the server that started it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from paceline.learn.training.early_stop import Kept
from paceline.learn.training.fine_tune import Candidate
from paceline.terminal.session import note
from paceline.train.loop.progress import Progress
from paceline.words import counted


class Reporter:
    """Prints each measurement, and the end."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

    def progressed(self, progress: Progress, kept: Kept | None) -> None:
        """Some steps were done; `kept` is the head after them, if it was measured on held-back rows."""
        loss = progress.history[-1].loss if progress.history else None
        if self._as_json:
            scores = {} if kept is None else {"tokens_per_pass": dict(kept.scores)}
            self._print(step=progress.step, total=progress.total, loss=loss, **scores)
        elif kept is not None:
            self._note(progress, kept, loss)

    def _note(self, progress: Progress, kept: Kept, loss: float | None) -> None:
        scores = ", ".join(f"{value:.3f} on {name} rows" for name, value in kept.scores.items())
        note(f"step {kept.step} of {progress.total}: loss {loss:.3f}, tokens per pass {scores}")

    def ended(self, candidate: Candidate | None, out: Path) -> None:
        """The training has ended; None: it was stopped."""
        if self._as_json:
            gains = candidate is not None and candidate.gains
            self._print(candidate=str(out) if gains else None, stopped=candidate is None)
        elif candidate is None:
            note("Stopped: there is no candidate.")
        elif not candidate.gains:
            note("The head drafts no better than before on rows that were held back: there is no candidate.")
        else:
            note(
                f"The candidate is in {out}: {counted(candidate.steps, 'steps')}, {candidate.seconds:.0f} s."
            )

    def _print(self, **facts: Any) -> None:
        typer.echo(json.dumps(facts))
