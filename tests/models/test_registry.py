import sys

import pytest
from tests.tables import rows

from marlaas.models import MissingPackage, NotAModel, UnknownModel, list_models, prepare, prepared, registry, resolve
from marlaas_api.errors import InvalidInput
from marlaas_api.kinds import ModelSpec


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MARLAAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_model_is_prepared_only_on_request(own_cache):
    assert [prepared(model.name) for model in list_models()] == [None, None]
    assert not own_cache.exists()


@pytest.mark.parametrize(("name", "hint"), rows(__file__, "unknown_names"))
def test_an_unknown_name_is_answered_with_the_nearest(name, hint):
    with pytest.raises(UnknownModel, match=hint) as caught:
        prepare(name)
    assert isinstance(caught.value, InvalidInput)
    assert "tiny and smollm2-135m-instruct" in str(caught.value)


def test_another_recipe_is_another_folder(monkeypatch, own_cache):
    recipe = registry._RECIPES["tiny"]
    other = registry._Recipe(recipe.model, recipe.build, recipe.sources[1:])
    folders = {registry._folder(recipe), registry._folder(other)}
    assert len(folders) == 2
    assert all(folder.parent == own_cache / "models" and folder.name.startswith("tiny-") for folder in folders)


def test_a_folder_of_ones_own_is_taken_as_it_is_only_if_it_is_a_model_and_a_volume_needs_a_cluster(tmp_path):
    folder = tmp_path / "m"
    for name, missing in rows(__file__, "missing_parts"):
        with pytest.raises(NotAModel, match=f"no base model in {folder}: {missing}"):
            resolve(ModelSpec(path=str(folder)))
        folder.mkdir(exist_ok=True)
        if name:
            (folder / name).touch()
    assert resolve(ModelSpec(path=str(folder))) == folder
    with pytest.raises(NotAModel, match="needs a cluster"):
        resolve(ModelSpec.model_validate({"pvc": {"claimName": "models", "path": "m"}}))


def test_a_package_that_is_not_here_is_named(monkeypatch, own_cache):
    for package in ("torch", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "marlaas.models.tiny", raising=False)
    told = "model tiny cannot be built here: the Python package torch is not installed; inst"
    with pytest.raises(MissingPackage, match=told):
        prepare("tiny")
    told = r"model Qwen/Qwen3-0\.6B@main cannot be fetched: the Python package huggingface_hub is"
    with pytest.raises(MissingPackage, match=told):
        resolve(ModelSpec.model_validate({"hub": {"id": "Qwen/Qwen3-0.6B"}}))
