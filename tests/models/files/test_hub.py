"""Models by the hub's names, against a server on this machine that speaks the hub's HTTP API."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from paceline.errors import ModelError
from paceline.models.files.hub import choose_gguf
from paceline.models.registry import load_checkpoint, resolve
from tests.models.model_files import config_of, random_tensors, write_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Repositories = dict[str, dict[str, bytes]]


class StandIn(BaseHTTPRequestHandler):
    """The parts of the hub's API that the client uses. A gated repository answers as the hub does."""

    repositories: ClassVar[Repositories]
    asked: ClassVar[list[str]]
    ranges: ClassVar[list[str]]  # of files, as they were asked for
    breaks: ClassVar[list[int]]  # bytes after which the next downloads break off

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *values: object) -> None:
        """Silence."""

    def _answer(self, with_body: bool) -> None:
        path = urlsplit(self.path).path.strip("/")
        self.asked.append(path)
        parts = path.removeprefix("api/models/").split("/")
        repository, action, name = "/".join(parts[:2]), parts[2:3], "/".join(parts[4:])
        files = self.repositories.get(repository)
        if repository == "org/gated" or (repository == "org/listed" and action == ["resolve"]):
            return self._send(403, b"", {"X-Error-Code": "GatedRepo"}, with_body)
        if files is None:
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"}, with_body)
        if path.startswith("api/"):
            listed = [{"type": "file", "path": own, "size": len(files[own]), "oid": own} for own in files]
            info = {"id": repository, "sha": COMMIT, "siblings": [{"rfilename": own} for own in files]}
            body = json.dumps(listed if action == ["tree"] else info).encode()
            return self._send(200, body, {"Content-Type": "application/json"}, with_body)
        content = files.get(name)
        if content is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        wanted = self.headers.get("Range", "")
        if with_body:
            self.ranges.append(wanted)
        if not wanted:
            return self._send(200, content, headers, with_body)
        start = int(wanted.removeprefix("bytes=").rstrip("-"))
        there = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        return self._send(206, content[start:], headers | there, with_body)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if with_body and self.breaks and status in (200, 206) and "ETag" in headers:
            self.wfile.write(body[: self.breaks.pop()])
            self.close_connection = True
        elif with_body:
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StandIn]]:
    from huggingface_hub import constants

    class Server(StandIn):
        repositories: ClassVar[Repositories] = {}
        asked: ClassVar[list[str]] = []
        ranges: ClassVar[list[str]] = []
        breaks: ClassVar[list[int]] = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield Server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def model(hub: type[StandIn], tmp_path: Path) -> str:
    """A repository with a model, and with files that must not be fetched."""
    folder = tmp_path / "made"
    folder.mkdir()
    write_folder(folder, "llama", random_tensors(config_of("llama")))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repositories["org/model"] = files | {"modeling.py": b"evil", "pytorch_model.bin": b"evil"}
    return "org/model"


def test_safetensors_are_fetched_without_code_or_pickles(hub: type[StandIn], model: str) -> None:
    folder = resolve(model)
    assert load_checkpoint(folder).config == config_of("llama")
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert not [path for path in hub.asked if path.endswith((".py", ".bin"))]


def test_a_fetched_model_is_served_from_the_cache_when_the_hub_is_away(
    hub: type[StandIn], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    folder = resolve(model)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(model) == folder
    with pytest.raises(ModelError, match="not in the cache, and HF_HUB_OFFLINE forbids"):
        resolve("org/other")


def test_an_unreachable_hub_is_named_with_the_remedy(
    hub: type[StandIn], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx
    import huggingface_hub

    def unreachable(*asked: object) -> list[str]:
        """As after the client's own retries, which take half a minute."""
        raise httpx.ConnectError("Name or service not known")

    folder = resolve(model)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", unreachable)
    assert resolve(model) == folder
    with pytest.raises(ModelError, match=r"the hub cannot be reached. Check the network and HF_ENDPOINT"):
        resolve("org/other")


@pytest.mark.parametrize("answer", ["503", "ReadTimeout"])
def test_a_hub_that_is_out_of_order_is_as_one_that_is_away(
    hub: type[StandIn], model: str, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    import httpx
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    def fail(*asked: object) -> list[str]:
        if answer == "ReadTimeout":
            raise httpx.ReadTimeout("timed out")
        request = httpx.Request("GET", "http://hub")
        raise HfHubHTTPError("busy", response=httpx.Response(503, request=request))

    folder = resolve(model)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", fail)
    assert resolve(model) == folder
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        resolve("org/other")


@pytest.mark.parametrize("set_up", ["logging.basicConfig()", "pass"], ids=["server", "command"])
def test_each_line_of_the_client_is_logged_once(set_up: str, tmp_path: Path) -> None:
    """A server logs what libraries do; a command leaves that to the client, which sets up its logs once."""
    program = f"""
import contextlib, logging
from paceline.errors import ModelError
from paceline.models.registry import resolve
{set_up}
with contextlib.suppress(ModelError):
    resolve("org/other")
logging.getLogger("huggingface_hub").warning("Retrying")
"""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr.count("Retrying") == 1


def test_without_the_hub_a_part_of_a_model_is_called_one(
    hub: type[StandIn], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    folder = resolve(model)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"only partly in the cache, .* it has config.json. Name one"):
        resolve(model)
    with pytest.raises(ModelError, match="only partly in the cache"):
        resolve(f"{model}:Q8_0")


def test_gguf_files_are_found_by_quantization_and_by_name(hub: type[StandIn]) -> None:
    files = {f"Model-1B-{kind}.gguf": kind.encode() for kind in ("Q8_0", "Q4_K_M", "IQ4_XS", "BF16")}
    hub.repositories["org/files"] = files | {"README.md": b""}
    assert resolve("org/files").read_bytes() == b"Q4_K_M"
    assert resolve("org/files:q8_0").read_bytes() == b"Q8_0"
    assert resolve("org/files:Model-1B-IQ4_XS.gguf").read_bytes() == b"IQ4_XS"
    with pytest.raises(
        ModelError, match=r"has no 'Q2_K'. It has BF16, IQ4_XS, Q4_K_M, Q8_0. Write org/files:"
    ):
        resolve("org/files:Q2_K")


def test_a_download_that_broke_off_continues_where_it_was(
    hub: type[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client's, between tries
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)  # what it keeps of a broken download
    hub.repositories["org/large"] = {"large-Q8_0.gguf": bytes(range(256)) * 8192}
    hub.breaks.append(1_500_000)
    assert resolve("org/large").read_bytes() == bytes(range(256)) * 8192
    first, *later = hub.ranges
    assert first == ""
    assert later
    assert all(0 < int(own.removeprefix("bytes=").rstrip("-")) <= 1_500_000 for own in later)


def test_short_names_and_vision_files(hub: type[StandIn]) -> None:
    files = {"gemma-3-4b-it-Q4_K_M.gguf": b"text", "mmproj-model-f16.gguf": b"vision"}
    hub.repositories["ggml-org/gemma-3-4b-it-GGUF"] = files
    assert resolve("gemma3:4b").read_bytes() == b"text"
    with pytest.raises(ModelError, match=r"has no 'F16'. It has Q4_K_M"):
        resolve("ggml-org/gemma-3-4b-it-GGUF:F16")
    with pytest.raises(ModelError, match="Did you mean 'gemma3:4b'"):
        resolve("gemma3:4c")


def test_names_as_the_pages_of_models_write_them(hub: type[StandIn]) -> None:
    files = ["Model-Q4_K_M.gguf", "Model-UD-Q4_K_XL.gguf", "BF16/Model-BF16-00001-of-00001.gguf"]
    hub.repositories["org/Model-GGUF"] = {name: name.encode() for name in files}
    for name, found in (
        ("org/Model-GGUF:UD-Q4_K_XL", 1),
        ("org/Model-GGUF:ud-q4_k_xl", 1),
        ("org/Model-GGUF:Q4_K_XL", 1),
        ("hf.co/org/Model-GGUF:Q4_K_M", 0),
        ("https://huggingface.co/org/Model-GGUF", 0),
        ("org/Model-GGUF:BF16", 2),
        ("org/Model-GGUF:BF16/Model-BF16-00001-of-00001.gguf", 2),
        ("org/Model-GGUF:Model-BF16-00001-of-00001.gguf", 2),
    ):
        assert resolve(name).read_bytes() == files[found].encode()
    with pytest.raises(ModelError, match=r"has no 'K_M'. It has BF16, Q4_K_M, Q4_K_XL"):
        resolve("org/Model-GGUF:K_M")


def test_all_that_a_model_needs_is_fetched_whatever_its_weights_are_called(
    hub: type[StandIn], model: str
) -> None:
    own = dict(hub.repositories[model])
    own["gptq_model-4bit-128g.safetensors"] = own.pop("model.safetensors")
    needed = {"chat_template.json", "quantize_config.json", "additional_chat_templates/tool_use.jinja"}
    other = {"consolidated.safetensors", "original/model.safetensors", "vision/config.json"}
    hub.repositories["org/odd"] = own | dict.fromkeys(needed | other, b"{}")
    (hub.repositories["org/odd"])["quantize_config.json"] = b'{"bits": 4}'
    folder = resolve("org/odd")
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == needed | {"config.json", "gptq_model-4bit-128g.safetensors"}


def test_of_a_head_the_embedding_of_its_mask_is_fetched_too(hub: type[StandIn], model: str) -> None:
    """Without it the head would load, and guess badly."""
    hub.repositories["org/head"] = hub.repositories[model] | {"mask_embedding.pt": b"a tensor"}
    found = {path.name for path in resolve("org/head").iterdir()}
    assert found == {"config.json", "model.safetensors", "mask_embedding.pt"}


def test_weights_that_an_index_names_are_fetched_and_no_others(hub: type[StandIn], model: str) -> None:
    own = dict(hub.repositories[model])
    del own["model.safetensors"]
    shards = {"model-00001-of-00002.safetensors", "mtp.safetensors"}
    index = {"weight_map": dict(zip("abc", [*shards, "*.bin"], strict=True))}
    own["model.safetensors.index.json"] = json.dumps(index).encode()
    other = {"model.fp16.safetensors", "pytorch_model.bin"}
    hub.repositories["org/indexed"] = own | dict.fromkeys(shards | other, b"{}")
    folder = resolve("org/indexed")
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == shards | {"config.json", "model.safetensors.index.json"}


def test_all_parts_of_a_split_file_are_fetched(hub: type[StandIn]) -> None:
    names = [f"q8/Model-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.repositories["org/parts"] = {name: name.encode() for name in names}
    first = resolve("org/parts:Q8_0")
    assert first.read_bytes() == names[0].encode()
    assert first.with_name(Path(names[1]).name).read_bytes() == names[1].encode()


def test_what_cannot_be_had_is_said_with_the_remedy(hub: type[StandIn]) -> None:
    with pytest.raises(ModelError, match=r"permission. Ask for it at .*/org/gated, then set HF_TOKEN"):
        resolve("org/gated")
    hub.repositories["org/listed"] = {"model-Q8_0.gguf": b""}  # its files are listed, but not given
    with pytest.raises(ModelError, match=r"permission. Ask for it at .*/org/listed, then set HF_TOKEN"):
        resolve("org/listed")
    with pytest.raises(ModelError, match="no such repository, or it is private"):
        resolve("org/missing")
    hub.repositories["org/pickles"] = {"config.json": b"{}", "pytorch_model.bin": b"evil"}
    with pytest.raises(ModelError, match="never loaded: choose a repository with safetensors or GGUF"):
        resolve("org/pickles")


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install 'paceline\[hub\]'"):
        resolve("org/name")


def test_of_several_files_one_must_be_meant() -> None:
    with pytest.raises(ModelError, match=r"lacks the first part of a-00002-of-00003\.gguf"):
        choose_gguf("org/name", ["a-00003-of-00003.gguf", "a-00002-of-00003.gguf"], None)
    assert choose_gguf("org/name", ["only.gguf"], None) == "only.gguf"
    assert choose_gguf("org/name", ["b-Q2_K.gguf", "a-Q6_K.gguf"], None) == "a-Q6_K.gguf"
    with pytest.raises(ModelError, match="has several files of 'Q6_K': give a file's name"):
        choose_gguf("org/name", ["a-Q6_K.gguf", "b-Q6_K.gguf"], "Q6_K")
    parts = ["a-Q6_K-00002-of-00002.gguf", "a-Q6_K-00001-of-00002.gguf"]
    assert choose_gguf("org/name", parts, None) == choose_gguf("org/name", parts, "Q6_K") == parts[1]


def test_draft_models_and_other_files_beside_a_model_are_not_taken_for_it() -> None:
    beside = [
        "mmproj-BF16.gguf",
        "imatrix_unsloth.gguf",
        "mtp-gemma-4-12B-it.gguf",
        "MTP/gemma-Q8_0-MTP.gguf",
    ]
    model = "gemma-4-12B-it-qat-UD-Q4_K_XL.gguf"
    assert choose_gguf("org/name", [*beside, model], None) == model
    files = ["mtp-ornith-9b-mtp-kl-Q8_0.gguf", "ornith-9b-mtp-kl-Q8_0.gguf"]
    assert choose_gguf("org/name", files, "Q8_0") == choose_gguf("org/name", files, None) == files[1]
    assert choose_gguf("org/name", ["Qwen3.6-27B-MTP-Q8_0.gguf"], "Q8_0") == "Qwen3.6-27B-MTP-Q8_0.gguf"


def test_a_draft_head_beside_a_model_is_found_by_its_name() -> None:
    head, model = "dflash-Qwen3-8B-Q8_0.gguf", "Qwen3-8B-Q8_0.gguf"
    assert (
        choose_gguf("org/name", [head, model], None)
        == choose_gguf("org/name", [head, model], "Q8_0")
        == model
    )
    assert choose_gguf("org/name", [head, model], head) == head
    assert choose_gguf("org/name", [head], None) == head


def test_a_folder_of_gguf_files_is_its_model(tmp_path: Path) -> None:
    for name in ("mmproj-BF16.gguf", "gemma-4-12B-it-qat-UD-Q4_K_XL.gguf"):
        (tmp_path / name).touch()
    assert resolve(str(tmp_path)).name == "gemma-4-12B-it-qat-UD-Q4_K_XL.gguf"
