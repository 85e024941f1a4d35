"""`paceline check`: it reports the machine, passes on a sound one and fails on a broken one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from paceline import LLM
from paceline.backends import options
from paceline.backends.cpu.tiles.weight_tile import FORMAT_NAMES
from paceline.backends.cpu.weights import model_weights
from paceline.backends.cpu.weights.packing import choose_format
from paceline.backends.load import load_backend
from paceline.backends.options import BackendOptions
from paceline.check import command as check_room
from paceline.check import gpu as check_gpu
from paceline.check import kernels as check_kernels
from paceline.check.command import Outcome, Report, check
from paceline.check.digest import compare_digest, generation_digest
from paceline.check.kernels import CASES, compare
from paceline.cli import main
from paceline.errors import BackendError
from paceline.machine import Gpu
from paceline.models.files.safetensors_writer import encode
from tests.models.model_files import config_of, random_tensors, write_gguf


@pytest.fixture
def empty_home(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return str(write_gguf(path, "llama", random_tensors(config_of("llama"))))


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_of_this_machine_agree_with_numpy(name):
    assert "the same bits" in compare(CASES[name])


def test_every_weight_format_is_tested():
    tested = {choose_format(case.kind, case.quantization) for case in CASES.values()}
    assert tested == set(FORMAT_NAMES)


def test_a_wrong_kernel_is_noticed(plant):
    right = check_kernels.multiply

    def wrong(tensor, quantization, activations):
        found = right(tensor, quantization, activations)
        found[0, 0] *= 1.01
        return found

    plant(check_kernels, "multiply", wrong)
    with pytest.raises(BackendError, match="differs from numpy"):
        compare(CASES["int8"])


def test_a_kernel_whose_rows_depend_on_each_other_is_noticed(plant):
    right = check_kernels.multiply

    # below the tolerance, but other bits
    def wrong(tensor, quantization, activations):
        return right(tensor, quantization, activations) * (1 + 2e-7 * (len(activations) > 1))

    plant(check_kernels, "multiply", wrong)
    with pytest.raises(BackendError, match="alone has other bits"):
        compare(CASES["float32"])


def test_the_digest_of_a_fixed_generation_is_that_of_every_machine():
    assert compare_digest() == "digest e21707309dfe6e49, as on every machine"
    assert generation_digest(threads=1) == "e21707309dfe6e49"


def test_other_bits_than_those_of_other_machines_are_noticed(plant):
    right = model_weights.rope_tables

    def wrong_in_the_last_bit(rope, head_dim, positions):
        cosines, sines = right(rope, head_dim, positions)
        return np.nextafter(cosines, np.float32(0)), sines

    plant(model_weights, "rope_tables", wrong_in_the_last_bit)
    assert "not e21707309dfe6e49 as on other machines" in compare_digest()


@pytest.mark.real
def test_the_default_model_has_the_digest_of_every_machine():
    assert check_room.model_outcome(None).endswith("digest 3e8699c39f11ea2a, as on every machine")


def test_the_report_tells_machine_kernels_versions_and_models(empty_home, tmp_path):
    report = check()
    assert set(report.facts) == {"machine", "gpu", "kernels", "versions", "models"}
    assert report.facts["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert report.facts["models"]["home"] == str(tmp_path)
    assert report.facts["models"]["smollm2-135m"] == "not fetched"
    assert report.facts["kernels"]["cache"].startswith("cold")
    statuses = [outcome.status for outcome in report.outcomes]
    assert statuses == [*["ok"] * len(CASES), "ok", "skipped", "skipped"]
    assert report.passed


def test_the_gpu_is_shown_and_tested_where_there_is_one(monkeypatch):
    monkeypatch.setattr(check_room, "find_gpu", lambda: Gpu("NVIDIA H200", facts=(("memory", "139.8 GiB"),)))
    monkeypatch.setattr(options, "find_gpu", check_room.find_gpu)
    monkeypatch.setattr(check_gpu, "compare_gpu", lambda: "logits within 1e-02 of torch")
    assert check_room.gpu_facts() == {
        "gpu": "NVIDIA H200",
        "memory": "139.8 GiB",
        "backend": "cuda: found NVIDIA H200",
    }
    assert check_room.gpu_outcome() == "logits within 1e-02 of torch"


def test_the_gpu_test_compares_two_backends(monkeypatch):
    def load(checkpoint, asked, rows):
        return load_backend(checkpoint, BackendOptions(backend="cpu", quantization="none", threads=1), rows)

    monkeypatch.setattr(check_gpu, "load_backend", load)  # the cpu backend stands in for both
    assert "the same bits" in check_gpu.compare_gpu()


def test_a_gpu_with_other_logits_is_noticed(monkeypatch):
    def load(checkpoint, asked, rows):
        tensors = dict(checkpoint.tensors)
        if asked.backend == "cuda":
            name = "model.layers.0.mlp.down_proj.weight"
            tensors[name] = encode(-tensors[name].float32())
        cpu = BackendOptions(backend="cpu", quantization="none", threads=1)
        return load_backend(replace(checkpoint, tensors=tensors), cpu, rows)

    monkeypatch.setattr(check_gpu, "load_backend", load)
    with pytest.raises(BackendError, match="differ from torch"):
        check_gpu.compare_gpu()


def test_a_model_is_tested_alone_and_in_a_batch(tiny_model):
    assert "the same bits alone, again and among other requests" in check_room.model_outcome(tiny_model)


def test_a_model_whose_answer_depends_on_the_batch_is_noticed(plant, tiny_model):
    right = LLM.generate

    def wrong(self, prompts, sampling_params=None, *, use_tqdm=True):
        outputs = right(self, prompts, sampling_params, use_tqdm=use_tqdm)
        if len(outputs) > 1:
            outputs[-1].outputs[0].token_ids[-1] += 1
        return outputs

    plant(LLM, "generate", wrong)
    with pytest.raises(BackendError, match="among other requests it gave"):
        check_room.model_outcome(tiny_model)


def test_the_command_prints_json_and_its_exit_code_is_the_verdict(monkeypatch, capsys):
    for status, code in (("ok", 0), ("skipped", 0), ("failed", 1)):
        report = Report({"machine": {"cores": 2}}, [Outcome("kernel", status, "because")])
        monkeypatch.setattr(check_room, "check", lambda model, with_torch, report=report: report)
        for arguments in (["--json"], []):
            monkeypatch.setattr(sys, "argv", ["paceline", "check", *arguments])
            with pytest.raises(SystemExit) as end:
                main()
            assert end.value.code == code
            out = capsys.readouterr().out
            assert "because" in out
            if arguments:
                document = json.loads(out)
                assert document["passed"] is (status != "failed")
                assert document["machine"] == {"cores": 2}


def test_a_model_that_cannot_be_read_fails_the_check_with_its_remedy(empty_home):
    (outcome,) = [one for one in check("nowhere.gguf").outcomes if one.name == "model"]
    assert outcome.status == "failed"
    assert "Give an alias" in outcome.detail
