from __future__ import annotations

from itertools import pairwise

import pytest

from llmproxy.core.backends.catalogue import NAME_CHARS_MAX, Catalogue, Target
from llmproxy.core.domain import Listing, ModelCard, Outcome, Refused
from tests.core import make
from tests.core.make import listing


def catalogue(*backends: str, aliases: dict[str, str] | None = None) -> Catalogue:
    return Catalogue(backends, aliases or {})


def refusal(of: Catalogue, name: str | None) -> Refused:
    refused = make.refusal(of.resolve, name)
    assert of.awaits(name) is (refused.outcome is Outcome.REJECTED_NO_BACKENDS)
    return refused


def names_of(*names: str, context: int | None = 10) -> Listing:
    return Listing(0.0, tuple(ModelCard(name, None, context) for name in names))


def listed(**listings: Listing) -> Catalogue:
    names = catalogue(*listings)
    for backend, one in listings.items():
        names.listed(backend, one)
    return names


def test_backends_of_one_base_model_are_a_pool_with_its_name() -> None:
    names = catalogue("a", "b")
    assert names.listed("a", listing("lora-0"))
    assert names.listed("b", listing("lora-1"))
    assert names.pools == ("base",)
    assert names.pool_of("a") == names.pool_of("b") == "base"
    assert names.resolve("base") == Target("base", "base", "base", None, 4096)
    assert names.resolve("lora-1") == Target("lora-1", "lora-1", "base", "lora-1", 4096)


def test_two_served_names_of_one_backend_are_one_pool() -> None:
    names = listed(a=names_of("long-name", "short"))
    assert names.pools == ("long-name",)
    assert names.resolve("short") == Target("short", "short", "long-name", None, 10)


@pytest.mark.parametrize("turned", [False, True])
def test_backends_that_list_a_name_in_common_are_one_pool(turned: bool) -> None:
    both = ("y", "x") if turned else ("x", "y")
    names = listed(a=names_of(*both), b=names_of("y"), c=names_of("z"))
    assert names.names == {"y": {"x", "y"}, "z": {"z"}}
    assert names.members == {"a": "y", "b": "y", "c": "z"}
    assert [names.resolve(name).pool for name in "xyz"] == ["y", "y", "z"]
    assert [names.pool_named(name) for name in ("x", "y", "z", "other")] == ["y", "y", "z", "other"]


def test_a_backend_joins_two_pools_and_its_removal_parts_them() -> None:
    names = listed(a=names_of("x"), b=names_of("x", "y"), c=names_of("y"))
    assert names.names == {"x": {"x", "y"}}, "the first by the alphabet of two that two list, and one lists first"
    names.remove("b")
    assert names.names == {"x": {"x"}, "y": {"y"}}


def test_a_model_of_external_backends_alone_has_an_entry() -> None:
    names = catalogue(aliases={"cheap": "far"})
    names.external = frozenset({"far"})
    assert names.model("cheap") == {"id": "cheap", "object": "model", "root": "far", "parent": None}


def test_adapters_join_nothing() -> None:
    names = listed(a=listing("lora"), b=listing("lora", base="other"))
    assert names.pools == ("base", "other")
    assert names.resolve("lora").pool == "base"
    names.listed("b", names_of("other", "lora"))
    assert names.resolve("lora") == Target("lora", "lora", "other", None, 10), "a base model goes before an adapter"


def test_a_roll_out_changes_the_name_of_a_pool_once() -> None:
    names = listed(**{f"r{n}": names_of("old") for n in range(4)})
    seen = [names.pools]
    for served in (("new", "old"), ("new",)):
        for backend in range(4):
            names.listed(f"r{backend}", names_of(*served))
            seen.append(names.pools)
    changes = sum(one != other for one, other in pairwise(seen))
    assert (seen[0], seen[-1], changes) == (("old",), ("new",), 1)


def test_configured_name_is_the_name_of_its_pool() -> None:
    names = catalogue("a", "b")
    names.named = frozenset({"x", "w"})
    names.listed("a", names_of("y", "x", "w"))
    assert names.pools == ("w",)


def test_the_context_of_a_name_is_the_longest_where_it_is_listed() -> None:
    names = listed(a=names_of("x", context=10), b=names_of("x", "y", context=20), c=names_of("y", context=30))
    assert {name: names.resolve(name).context_tokens for name in "xy"} == {"x": 20, "y": 30}


def test_a_conversation_stays_with_a_name_that_its_backend_lists() -> None:
    names = Catalogue("ab", {"both": {"x": 1.0, "y": 1.0}})
    names.listed("a", names_of("x"))
    names.listed("b", names_of("z", "y"))
    names.listed("b", names_of("x", "y"))
    assert {names.resolve("both", str(key), beside="a").model for key in range(20)} == {"x"}


def test_alias_means_its_target_and_keeps_the_requested_name() -> None:
    names = catalogue("a", aliases={"fast": "lora-0", "nowhere": "gone"})
    names.listed("a", listing("lora-0"))
    assert names.resolve("fast") == Target("fast", "lora-0", "base", "lora-0", 4096)
    nowhere = refusal(names, "nowhere")
    assert nowhere.outcome is Outcome.UNKNOWN_MODEL
    assert "`gone`, which no backend serves" in nowhere.message


def test_an_unknown_name_waits_for_backends_that_were_never_read() -> None:
    names = catalogue("a", "b")
    names.listed("a", listing())
    early = refusal(names, "other")
    assert early.outcome is Outcome.REJECTED_NO_BACKENDS
    assert early.retry_after_s == 1.0
    assert names.resolve("base").pool == "base"

    names.listed("b", listing())
    late = refusal(names, "other")
    assert late.outcome is Outcome.UNKNOWN_MODEL
    assert late.retry_after_s is None
    assert "`other` does not exist" in late.message
    assert "base" in late.message


def test_a_name_goes_only_when_a_newer_listing_lacks_it() -> None:
    names = catalogue("a")
    assert names.listed("a", listing("lora-0"))
    assert not names.listed("a", listing("lora-0", at_s=9.0)), "nothing changed, so nothing need be rebuilt"
    assert names.listed("a", listing("lora-1"))
    assert refusal(names, "lora-0").outcome is Outcome.UNKNOWN_MODEL
    assert names.resolve("lora-1").adapter == "lora-1"


def test_no_name_means_the_only_pool() -> None:
    names = catalogue("a", "b")
    assert refusal(names, None).outcome is Outcome.REJECTED_NO_BACKENDS
    names.listed("a", listing())
    assert names.resolve(None).model == "base", "a backend that never answers must not fail those without a name"
    names.listed("b", listing())
    assert names.resolve(None) == Target("base", "base", "base", None, 4096)
    names.listed("b", listing(base="other"))
    several = refusal(names, None)
    assert several.outcome is Outcome.BAD_REQUEST
    assert "base, other" in several.message


def test_a_backend_without_a_base_model_belongs_to_no_pool() -> None:
    names = catalogue("a")
    names.listed("a", Listing(0.0, ()))
    assert names.pool_of("a") is None
    assert names.pools == ()
    assert refusal(names, None).outcome is Outcome.BAD_REQUEST


def test_models_keeps_real_fields_and_lists_aliases_last() -> None:
    names = catalogue("a", aliases={"fast": "lora-0", "nowhere": "gone"})
    base = ModelCard("base", None, 4096, {"id": "base", "max_model_len": 4096, "owned_by": "vllm"})
    lora = ModelCard("lora-0", "base", None, {"id": "lora-0", "root": "/adapters/0", "parent": "base"})
    names.listed("a", Listing(0.0, (base, lora)))
    assert names.models() == [
        {"id": "base", "max_model_len": 4096, "owned_by": "vllm"},
        {"id": "lora-0", "root": "/adapters/0", "parent": "base"},
        {"id": "fast", "root": "lora-0", "parent": "base"},
    ]


def test_revision_increases_only_when_names_change() -> None:
    names = catalogue("a", aliases={"alias": "base"})
    seen = [names.revision]
    names.listed("a", listing("x"))
    seen.append(names.revision)
    assert names.targets == {name: names.resolve(name) for name in ("base", "x", "alias")}
    names.rename({})
    seen.append(names.revision)
    names.remove("a")
    seen.append(names.revision)
    assert seen == sorted(set(seen))
    names.add("b")
    names.listed("b", listing("x"))
    before = names.revision
    names.listed("b", listing("x", at_s=5.0))
    assert names.revision == before


def test_a_model_list_like_those_of_vllm_changes_nothing_unless_a_name_or_a_path_changes() -> None:
    def answer(at_s: float, root: str = "/adapters/0") -> Listing:
        # vLLM makes `created` and the id of the permission anew for each answer.
        fields = {"created": int(at_s), "permission": [{"id": f"modelperm-{at_s}", "created": int(at_s)}]}
        base = ModelCard("base", None, 4096, fields | {"root": "/base"})
        return Listing(at_s, (base, ModelCard("lora-0", "base", None, fields | {"root": root})))

    names = listed(a=answer(1.0), b=answer(1.5))
    before = names.revision, names.models()
    assert not names.listed("a", answer(3.0))
    assert (names.revision, names.models()) == before
    assert names.listed("a", answer(5.0, root="/adapters/1")), "loaded again in place, from another path"
    assert names.models()[1]["root"] == "/adapters/1"


def test_refusals_of_unknown_names_list_the_known_ones() -> None:
    one = Catalogue(["a", "b"], {})
    one.listed("a", listing("z", *(f"lora-{i}" for i in range(30))))
    assert "Known models: base, lora-0, lora-1, lora-10, " in refusal(one, "nobody").message
    one.listed("a", listing("z"))
    assert "1 of 2 backends never answered so far. Known models: base, z. " in refusal(one, "nobody").message
    one.add("c")
    assert "2 of 3 backends" in refusal(one, "nobody").message
    one.remove("a")
    assert "2 of 2 backends never answered so far. Known models: none. " in refusal(one, "nobody").message


def test_names_that_no_backend_lists_are_let_through_to_their_base_model() -> None:
    names = catalogue("a", "b", aliases={"user-alias": "other"})
    names.unlisted = {"user-*": "base", "user-vip-*": "other", "one": "base"}
    assert refusal(names, "user-1").outcome is Outcome.REJECTED_NO_BACKENDS
    names.listed("a", listing("user-2"))
    names.listed("b", listing(base="other"))
    for name in ("user-1", "user-2"):
        assert names.resolve(name) == Target("user-*", "base", "base", name, 4096), "also where it is listed already"
    assert names.resolve("one") == Target("one", "base", "base", "one", 4096)
    assert names.resolve("user-vip-1").model == "other", "the longest that covers it"
    assert names.resolve("user-alias") == Target("user-alias", "other", "other", None, 4096)
    assert "user-2" not in names.targets, "relay workers ask for what depends on more than the list"
    assert refusal(names, "user").outcome is Outcome.UNKNOWN_MODEL
    assert names.resolve("user-" + "x" * (NAME_CHARS_MAX - 5)).model == "base"
    assert refusal(names, "user-" + "x" * NAME_CHARS_MAX).outcome is Outcome.UNKNOWN_MODEL
    names.listed("b", listing(base="user-3"))
    assert names.resolve("user-3").adapter is None, "a base model means itself"
    assert "`other`" in refusal(names, "user-vip-1").message
