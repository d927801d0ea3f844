from __future__ import annotations

import pytest

from llmproxy.core.backends.catalogue import Catalogue, Target
from llmproxy.core.domain import Listing, ModelCard, Outcome, Refused
from tests.core.make import listing


def catalogue(*backends: str, aliases: dict[str, str] | None = None) -> Catalogue:
    return Catalogue(backends, aliases or {})


def refusal(of: Catalogue, name: str | None) -> Refused:
    with pytest.raises(Refused) as caught:
        of.resolve(name)
    assert of.awaits(name) is (caught.value.outcome is Outcome.REJECTED_NO_BACKENDS)
    return caught.value


def test_pool_has_the_name_of_its_first_base_model() -> None:
    names = catalogue("a", "b")
    assert names.listed("a", listing("lora-0"))
    assert names.listed("b", listing("lora-1"))
    assert names.pools == ("base",)
    assert names.pool_of("a") == names.pool_of("b") == "base"
    assert names.resolve("base") == Target("base", "base", "base", None, 4096)
    assert names.resolve("lora-1") == Target("lora-1", "lora-1", "base", "lora-1", 4096)


def test_two_served_names_of_one_backend_are_one_pool() -> None:
    names = catalogue("a")
    names.listed("a", Listing(0.0, (ModelCard("long-name", None, 10), ModelCard("short", None, 10))))
    assert names.pools == ("long-name",)
    assert names.resolve("short") == Target("short", "short", "long-name", None, 10)


def test_first_name_of_a_pool_belongs_to_it_alone() -> None:
    names = catalogue("a", "b")
    names.listed("a", Listing(0.0, (ModelCard("x", None, 10), ModelCard("y", None, 10))))
    names.listed("b", listing(base="y"))
    assert names.pools == ("x", "y")
    assert names.resolve("y").pool == "y"


def test_alias_means_its_target_and_keeps_the_requested_name() -> None:
    names = catalogue("a", aliases={"fast": "lora-0", "nowhere": "gone"})
    names.listed("a", listing("lora-0"))
    assert names.resolve("fast") == Target("fast", "lora-0", "base", "lora-0", 4096)
    nowhere = refusal(names, "nowhere")
    assert nowhere.outcome is Outcome.UNKNOWN_MODEL
    assert "`nowhere` stands for `gone`, which no backend serves" in nowhere.message


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


def test_known_names_are_sorted_once_for_all_refusals() -> None:
    one = Catalogue(["a", "b"], {})
    one.listed("a", listing("z", *(f"lora-{i}" for i in range(30))))
    assert one._known_names() is one._known_names()
    assert "Known models: base, lora-0, lora-1, lora-10, " in refusal(one, "nobody").message
    one.listed("a", listing("z"))
    assert "1 of 2 backends never answered so far. Known models: base, z. " in refusal(one, "nobody").message
    one.add("c")
    assert "2 of 3 backends" in refusal(one, "nobody").message
    one.remove("a")
    assert "2 of 2 backends never answered so far. Known models: none. " in refusal(one, "nobody").message
