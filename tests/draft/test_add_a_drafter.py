"""The page docs/extend/drafter.md, followed word by word: a drafter in a package of its own."""

from __future__ import annotations

import re
import sys
import tomllib
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline import LLM, SamplingParams
from paceline.core.trees import DraftPlan
from paceline.draft import methods, plugins
from paceline.draft.base import Drafter
from paceline.draft.speculative_config import parse_speculative_config
from paceline.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "drafter.md"
SMALLEST = """
from paceline.core.trees import DraftTrees
from paceline.draft.base import Drafter
from paceline.draft.methods import Method

METHOD = Method("broken", "AgainDrafter", num_speculative_tokens=1, trees=False)

class AgainDrafter(Drafter):
    name = "again"

    def propose(self, requests, plans):
        return DraftTrees.chains([request.token_ids[-1:] for request in requests])
"""
OPTIONS = """
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Options:
        size: int = 1

    def __init__(self, options):
        self.size = options.size
"""


@pytest.fixture
def install(monkeypatch, tmp_path):
    """A function that installs a package of one module and one entry point: what `pip install` leaves."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(package, module, source, name, value):
        (tmp_path / f"{module}.py").write_text(source)
        folder = tmp_path / f"{module}-0.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
        (folder / "entry_points.txt").write_text(f"[{plugins.GROUP}]\n{name} = {value}\n")
        monkeypatch.delitem(sys.modules, module, raising=False)
        plugins.installed.cache_clear()

    yield install
    plugins.installed.cache_clear()


@pytest.fixture
def bigram(install):
    """The page's package, installed."""
    page = PAGE.read_text()
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (project,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    declared = tomllib.loads(project)
    ((name, value),) = declared["project"]["entry-points"][plugins.GROUP].items()
    (module,) = declared["tool"]["setuptools"]["py-modules"]
    install(declared["project"]["name"], module, source, name, value)


def test_the_page_lists_the_whole_protocol():
    """Three methods; all else is declared by attributes, and how a class is made is no part of it."""
    _, protocol = PAGE.read_text().split("## The protocol\n")
    protocol, _ = protocol.split("### How it is made\n")
    methods = re.findall(r"^\| `(\w+)\(", protocol, re.MULTILINE)
    attributes = re.findall(r"^\| `(\w+)` ", protocol, re.MULTILINE)
    own = [name for name, member in vars(Drafter).items() if isfunction(member) and name[0] != "_"]
    assert methods == own == ["propose", "observe", "forget"]
    assert sorted(attributes) == sorted(Drafter.__annotations__)


@pytest.mark.real
def test_the_page_makes_a_working_drafter(bigram):
    llm = LLM("smollm2-135m", speculative_config={"method": "bigram", "most_tokens": 500})
    prompts = ["one two one two one two one two", "Once upon a time"]

    def run(speculative):
        params = SamplingParams(temperature=0, max_tokens=24, logprobs=1, speculative=speculative)
        return llm.generate(prompts, params)

    plain, drafted = run("off"), run("bigram")
    assert [output.outputs for output in drafted] == [output.outputs for output in plain]
    assert sum(output.metrics.speculative.num_accepted_draft_tokens for output in drafted) > 10


def test_its_options_are_checked_like_those_of_any_other(bigram):
    with pytest.raises(ConfigError, match="did you mean 'most_tokens'"):
        parse_speculative_config({"method": "bigram", "most_token": 3})
    with pytest.raises(ConfigError, match="most_tokens must be"):
        parse_speculative_config({"method": "bigram", "most_tokens": 0})


def test_it_is_named_where_methods_are_listed(bigram):
    assert parse_speculative_config("bigram").default_plan.budget == 4
    for wrong in ("trigram", {"method": "trigram"}):
        with pytest.raises(ConfigError, match=r"hybrid, bigram"):
            parse_speculative_config(wrong)


def test_a_name_that_two_packages_have_is_an_error_that_names_both(bigram, install):
    install("other", "other", "", "bigram", "other:METHOD")
    with pytest.raises(ConfigError, match=r"'bigram' is defined by \S+ 0.1 and by \S+ 0.1. Uninstall"):
        parse_speculative_config("bigram")


@pytest.mark.parametrize("name", ["ngram", "auto", "model"])
def test_a_name_of_paceline_cannot_be_taken(install, name):
    install("greedy", "greedy", "", name, "greedy:METHOD")
    with pytest.raises(ConfigError, match=f"'{name}' is defined by paceline and by greedy 0.1"):
        methods.find_method(name)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("", "AttributeError: module 'broken' has no attribute 'METHOD'"),
        ("METHOD = 'NgramDrafter'", "the entry point must name a Method, not 'NgramDrafter'"),
        (
            "from paceline.draft.methods import Method\nMETHOD = Method('broken', 'Nobody', 4, False)",
            "AttributeError: module 'broken' has no attribute 'Nobody'",
        ),
        (
            "from paceline.draft.methods import Method\nMETHOD = Method('broken', 'Method', 4, False)",
            "not a Drafter. If the package is yours: derive Method from paceline.draft.base.Drafter",
        ),
        (
            SMALLEST.replace("def propose", "def guess"),
            "has no propose. If the package is yours: define propose(requests, plans)",
        ),
        (SMALLEST + "    class Options: pass\n", "AgainDrafter.Options is not a dataclass"),
        (
            SMALLEST + "    def bind(self, kv): pass\n    def close(self): pass\n",
            "AgainDrafter was written for an earlier paceline. If the package is yours: bind() is now "
            "UnboundDrafter.bind: load gives one, and the Method says paged=True and close() is now save of",
        ),
    ],
)
def test_a_package_that_cannot_be_used_is_an_error_that_names_it(install, source, reason):
    install("broken-package", "broken", source, "mine", "broken:METHOD")
    with pytest.raises(ConfigError, match="the package broken-package") as error:
        parse_speculative_config("mine")
    assert reason in str(error.value)
    assert parse_speculative_config("ngram").drafters  # others still work


def test_propose_and_a_name_are_enough(install):
    drafter = load(install, SMALLEST)
    request = SimpleNamespace(token_ids=[3, 5])
    assert drafter.propose([request], [DraftPlan("again", 1)]).tokens.tolist() == [5]
    with pytest.raises(ConfigError, match="'size'"):
        parse_speculative_config({"method": "again", "size": 3})


def test_options_reach_a_constructor_without_a_load(install):
    drafter = load(install, SMALLEST + OPTIONS, size=3)
    assert drafter.size == 3


def test_a_constructor_that_raises_is_an_error_that_names_the_remedy(install):
    source = SMALLEST + "    def __init__(self, size): pass\n"
    with pytest.raises(ConfigError, match="missing 1 required positional argument") as error:
        load(install, source)
    assert "If the package is yours: AgainDrafter() must work, or define load(options, target)" in str(
        error.value
    )


UNBOUND = """
    @classmethod
    def load(cls, options, target):
        from paceline.draft.base import UnboundDrafter
        return UnboundDrafter("again", cls, bytes_per_page=64)

    def __init__(self, kv):
        self.seen = kv
"""


def test_a_drafter_with_pages_of_its_own_is_made_when_there_is_a_cache(install):
    install("again", "broken", SMALLEST.replace("trees=False", "trees=False, paged=True") + UNBOUND, *AGAIN)
    config = parse_speculative_config("again").drafters["again"]
    loaded = methods.load_drafter("again", config, None)
    assert loaded.bytes_per_page == 64
    assert loaded.bind("the cache").seen == "the cache"


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        (SMALLEST + UNBOUND, "return the drafter from load(options, target), or say paged=True"),
        (SMALLEST.replace("trees=False", "trees=False, paged=True"), "return an UnboundDrafter"),
    ],
)
def test_a_load_that_gives_something_else_is_an_error_that_names_the_remedy(install, source, remedy):
    with pytest.raises(ConfigError, match=r"its load gave the type (Again|Unbound)Drafter") as error:
        load(install, source)
    assert f"If the package is yours: {remedy}" in str(error.value)


AGAIN = "again", "broken:METHOD"  # the entry point


def load(install, source, **options):
    """The drafter that paceline loads from a package with this module."""
    install("again", "broken", source, *AGAIN)
    config = parse_speculative_config({"method": "again", **options}).drafters["again"]
    return methods.load_drafter("again", config, None).bind(None)
