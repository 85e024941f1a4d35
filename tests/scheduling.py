"""Which files of tests go to the same process, and which go first, when several processes share them.

A file goes to one process, so that its fixtures are made once. Files of a group share something that takes
seconds to set up. What takes longest goes first, so that no process is left with it at the end.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

GROUPS = {
    "lossless": (  # the real model, and the truth about its answers
        "tests/lossless/test_constrained.py",
        "tests/lossless/test_head_swap.py",
        "tests/lossless/test_planted_bugs.py",
        "tests/lossless/test_resume.py",
        "tests/lossless/test_same_bytes.py",
    ),
    "transformers": (  # its import
        "tests/backends/torch/test_backend.py",
        "tests/backends/torch/test_real_model.py",
        "tests/benchmarks/test_perplexity.py",
        "tests/draft/heads/test_mtp.py",
        "tests/models/gguf/test_sentencepiece.py",
        "tests/models/test_tokenizer.py",
        "tests/models/transformer/test_transformer.py",
        "tests/train/loop/test_sequences.py",
    ),
    "server": (  # one server of the real model
        "tests/serve/test_client_matrix.py",
        "tests/serve/openai/test_openai_client.py",
        "tests/serve/openai/test_openai_tools.py",
        "tests/serve/test_same_bytes.py",
    ),
}

# groups and files of about 10 seconds and more, the longest first
FIRST = (
    "lossless",
    "server",
    "transformers",
    "tests/train/test_commands.py",
    "tests/test_readme.py",
    "tests/bench/test_decode.py",
    "tests/backends/cuda/decode/test_decode_loop.py",
    "tests/train/loop/test_trainer.py",
    "tests/serve/test_restart.py",
    "tests/serve/test_schemathesis.py",
    "tests/backends/cpu/test_batch_invariance.py",
    "tests/backends/cpu/test_batch_invariance_real.py",
    "tests/backends/cuda/kernels/test_prompt_lookup.py",
    "tests/control/test_auto.py",
    "tests/lossless/test_distribution_sampled.py",
)

_GROUP_OF = {file: group for group, files in GROUPS.items() for file in files}


class Scheduling(LoadFileScheduling):
    """Gives out groups and files: those of FIRST, then the others in their order."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return _GROUP_OF.get(file, file)

    def _assign_work_unit(self, node: WorkerController) -> None:
        first = next((name for name in FIRST if name in self.workqueue), None)
        if first is not None:
            self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)
