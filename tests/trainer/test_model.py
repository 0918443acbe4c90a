"""The gateway against plain transformers and peft: what a forward pass computes, and that adapters share nothing but the base."""

import gc
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.tables import rows
from tests.trainer.harness import VOCABULARY, assignment_of, job
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from marlaas_worker.adapters import AdapterInvalid, write_adapter
from marlaas_worker.base_model import ModelUnusable
from marlaas_worker.trainer import memory
from marlaas_worker.trainer.batching import MicroBatch, Segment, chain, pack_prefix_tree
from marlaas_worker.trainer.batching import collate as collate_rows
from marlaas_worker.trainer.learner import Learner
from marlaas_worker.trainer.lora import TargetUnknown, WeightsMismatch, initial_weights
from marlaas_worker.trainer.model import BaseModel


def segment(seed, prompt, generated):
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, VOCABULARY, prompt + generated).astype(np.int32)
    mask = np.arange(len(ids)) >= prompt
    return Segment(ids, mask, np.zeros(len(ids), np.float32), 0, 1.0)


def collate(segments):
    return collate_rows([chain(part) for part in segments])


def attach(base, seed, rank=4, alpha=8, targets=()):
    adapter, draw = base.attach(rank, alpha, targets), torch.Generator().manual_seed(seed)
    adapter.load({name: 0.2 * torch.randn(one.shape, generator=draw) for name, one in adapter.parameters.items()})
    return adapter


def gradients(base, adapter, *batches: MicroBatch):
    for parameter in adapter.parameters.values():
        parameter.grad = None
    for batch in batches:
        base.backward(base.logprobs(adapter, batch, 1.0).sum(), batch)
    return {name: one.grad.clone() for name, one in adapter.parameters.items() if one.grad is not None}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_merged_model(base, sampler, temperature):
    adapter = attach(base, 1)
    segments = [segment(1, 3, 5), segment(2, 6, 1), segment(3, 1, 9)]
    found = base.logprobs(adapter, collate(segments), temperature)
    sampler.merge(adapter.tensors(), adapter.config.scaling)
    expected = [
        sampler.logprobs(part.ids.tolist(), temperature)[place - 1, part.ids[place]]
        for part in segments
        for place in np.flatnonzero(part.generated)
    ]
    assert torch.allclose(found, torch.stack(expected), atol=2e-5)


def of_peft(folder, adapter, parts, **made):
    """Logprobs of the parts' tokens under the adapter as PEFT loads it; with `made`, PEFT first makes and saves it, all weights random."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    def plain() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder)

    if made:
        torch.manual_seed(0)
        trained = get_peft_model(plain(), LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **made))
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                parameter.data += 0.1 * torch.randn_like(parameter)
        trained.save_pretrained(adapter)
    loaded, found = PeftModel.from_pretrained(plain(), adapter).eval(), []
    for part in parts:
        with torch.no_grad():
            logits = loaded(input_ids=torch.tensor([part.ids.tolist()])).logits[0].log_softmax(-1)
        found.append(logits[:-1].gather(1, torch.tensor(part.ids[1:, None].tolist())).squeeze(1))
    return torch.cat(found)


PROBES = [segment(seed, 1, 9) for seed in (1, 2, 3)]


def test_peft_loads_what_is_written_and_computes_the_same(base, tiny_model, tmp_path):
    adapter = attach(base, 5, targets=("q_proj", "down_proj"))
    for name, data in write_adapter(adapter.tensors(), adapter.config).items():
        (tmp_path / name).write_bytes(data)
    expected = of_peft(tiny_model, tmp_path, PROBES)
    assert torch.allclose(base.logprobs(adapter, collate(PROBES), 1.0), expected, atol=2e-5)


@pytest.mark.parametrize(("fields", "refused"), rows(__file__, "peft"))
def test_an_adapter_that_peft_made_computes_the_same_here_or_is_refused_by_name(
    base, tiny_model, tmp_path, fields, refused
):
    """The trainer's begin of a job, on three probes; PEFT's loaded model is the reference."""
    expected = of_peft(tiny_model, tmp_path, PROBES, **{"target_modules": ["q_proj", "v_proj", "up_proj"], **fields})
    document = job(agent={"adapter": {"rank": 4, "alpha": 8}, "initFrom": {"path": str(tmp_path)}})
    learner = Learner(base, assignment_of(document))
    if refused:
        with pytest.raises(AdapterInvalid, match=f"more than plain LoRA: .*{refused} is "):
            learner.begin()
        return
    assert learner.begin() == ()
    adapter = base.attach(4, 8, ())
    adapter.load(learner.weights())
    found, alone = (base.logprobs(one, collate(PROBES), 1.0) for one in (adapter, None))
    assert torch.allclose(found, expected, atol=2e-5)
    assert (found - alone).abs().max() > 0.1


def with_shared_beginnings(base):
    """Six segments of which five share a row, and the segments alone."""
    prompt, group = segment(1, 12, 0).ids, []
    for number in range(5):
        ids = np.concatenate([prompt, segment(number % 4, 0, 3 + number).ids])  # the first and the last begin alike
        group.append(Segment(ids, np.arange(len(ids)) >= 12, np.zeros(len(ids), np.float32), 0, float(number)))
    rows = [
        row for parts in (group, [segment(9, 2, 20)]) for row in pack_prefix_tree(parts, base.pairs_per_token, 1000)
    ]
    assert len(rows) == 2
    assert len(rows[0]) <= 12 + (3 + 4 + 5 + 6 + 7) - 3
    return collate_rows(rows), [*group, segment(9, 2, 20)]


@pytest.mark.parametrize("how", ["padded", "with shared beginnings"])
def test_padding_and_shared_beginnings_change_logprobs_and_gradients_by_no_more_than_rounding(base, how):
    adapter = attach(base, 1)
    segments = [segment(1, 3, 4), segment(2, 20, 9), segment(3, 2, 2)]
    together = collate(segments)
    if how != "padded":
        together, segments = with_shared_beginnings(base)
        assert together.num_padded_tokens < 0.6 * collate(segments).num_padded_tokens
    alone = [collate([part]) for part in segments]
    logprobs = torch.cat([base.logprobs(adapter, one, 0.7) for one in alone])
    assert torch.allclose(base.logprobs(adapter, together, 0.7), logprobs, atol=1e-5)
    found, expected = gradients(base, adapter, together), gradients(base, adapter, *alone)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-5 * float(value.abs().max()) + 1e-7)


def test_an_architecture_whose_layers_do_not_see_everything_shares_nothing(tiny_model, tmp_path):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    for name, window in (("sliding", 4), ("full", None)):
        config = MistralConfig(vocab_size=61, num_hidden_layers=1, sliding_window=window, **sizes)
        MistralForCausalLM(config).save_pretrained(tmp_path / name)
    assert BaseModel(str(tmp_path / "sliding")).pairs_per_token == 0
    assert BaseModel(str(tmp_path / "full")).pairs_per_token == 6 * 32
    for dtype in (torch.float32, torch.bfloat16):
        assert BaseModel(str(tiny_model), dtype=dtype).pairs_per_token == 6 * 64


def test_what_follows_a_generated_token_and_what_pads_it_has_exactly_no_gradient(base):
    adapter = attach(base, 1)
    part = segment(1, 4, 6)
    masked = Segment(part.ids, np.arange(10) == 5, part.behaviour, 0, 1.0)
    seen: list[Tensor] = []

    def watch(_, __, output):
        output.last_hidden_state.register_hook(seen.append)

    hook = base._decoder.register_forward_hook(watch)
    batch = collate([masked, segment(2, 8, 12)])
    base.backward(base.logprobs(adapter, batch, 1.0)[:1].sum(), batch)
    hook.remove()
    rows = [tuple(place) for place in seen[0].abs().sum(-1).nonzero().tolist()]
    assert rows == [(0, 4)]  # the hidden state before the one generated token, and no other


def test_an_adapter_computes_the_same_bits_alone_and_among_others(base, tiny_model):
    batch, alone = collate([segment(1, 3, 5), segment(2, 4, 7)]), attach(base, 1)
    weights = gradients(base, alone, batch)
    trained = {id(parameter) for parameter in alone.parameters.values()}
    for name, parameter in base._model.named_parameters():
        assert parameter.requires_grad == (parameter.grad is not None) == (id(parameter) in trained), name
    crowded = BaseModel(str(tiny_model))
    others = [attach(crowded, 7, rank=16, targets=("q_proj",)), attach(crowded, 8, targets=("up_proj", "v_proj"))]
    adapter = attach(crowded, 1)
    for other in others:
        gradients(crowded, other, batch)
    before = [value.grad.clone() for value in others[0].parameters.values() if value.grad is not None]
    assert torch.equal(crowded.logprobs(adapter, batch, 1.0), base.logprobs(alone, batch, 1.0))
    found = gradients(crowded, adapter, batch)
    crowded.detach(others[1])
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    after = [value.grad for value in others[0].parameters.values() if value.grad is not None]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_initial_weights_depend_on_seed_agent_and_name_alone(base):
    first = base.attach(4, 8, ())
    torch.rand(7)
    second = base.attach(4, 8, ("q_proj", "o_proj"))
    weights, fewer = initial_weights(first.parameters, 3, "policy"), initial_weights(second.parameters, 3, "policy")
    assert all(torch.equal(weights[name], value) for name, value in fewer.items())
    assert not torch.equal(*(initial_weights(first.parameters, 3, agent)[next(iter(weights))] for agent in ("a", "b")))
    assert all(bool(value.any()) == (".lora_A." in name) for name, value in weights.items())
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
    assert 0.9 / 96**0.5 < float(weights[name].abs().max()) <= 1 / 96**0.5
    layers = {name.split(".")[-3] for name in first.parameters}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}, "without targets"


def test_targets_weights_and_folders_that_do_not_fit_are_refused_and_nothing_is_changed(base, tmp_path):
    with pytest.raises(TargetUnknown, match=r"'qproj' is not a linear layer .* did you mean q_proj"):
        base.attach(4, 8, ("qproj",))
    with pytest.raises(TargetUnknown, match="'lm_head' is not a linear layer"):
        base.attach(4, 8, ("lm_head",))
    adapter, wide = attach(base, 1), attach(base, 2, rank=8)
    before = adapter.tensors()
    with pytest.raises(WeightsMismatch, match="does not fit this adapter"):
        adapter.load(wide.tensors())
    assert all(torch.equal(before[name], value) for name, value in adapter.tensors().items())
    with pytest.raises(ModelUnusable, match="has no base model"):
        BaseModel(str(tmp_path / "nothing"))
    with pytest.raises(ModelUnusable, match="cannot be loaded"):
        BaseModel(str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "settings"), rows(__file__, "scaled_logits"))
def test_an_architecture_that_changes_its_logits_behind_the_head_is_refused(tmp_path, dtype, name, settings):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(vocab_size=61, num_hidden_layers=1, **sizes, **settings)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    with pytest.raises(ModelUnusable, match=f"{name}ForCausalLM changes its logits after the output head"):
        BaseModel(str(tmp_path), dtype=dtype)


def kept(base, adapter, batch):
    """What a forward pass keeps for its backward pass, weights aside."""
    found: dict[int, Tensor] = {}

    def keep(tensor):
        if not isinstance(tensor, nn.Parameter):
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        graph = base.logprobs(adapter, batch, 1.0)
    del graph
    return list(found.values())


def size(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def batches(base):
    return [collate([segment(1, 3, 40), segment(2, 6, 30)]), with_shared_beginnings(base)[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", rows(__file__, "recomputed"), ids=str)
def test_recomputed_layers_and_mlps_give_the_same_bits_and_keep_less(tiny_model, monkeypatch, plan, dtype):
    often, never = (BaseModel(str(tiny_model), activation_bytes=most, dtype=dtype) for most in (0, None))
    twice, once = attach(often, 1), attach(never, 1)
    monkeypatch.setattr(memory, "cheapest", lambda *_: memory.Recomputed(*plan))
    for batch in batches(never):
        assert torch.equal(often.logprobs(twice, batch, 0.7), never.logprobs(once, batch, 0.7))
        expected = gradients(never, once, batch)
        assert all(torch.equal(value, expected[name]) for name, value in gradients(often, twice, batch).items())
        assert size(kept(often, twice, batch)) < size(kept(never, once, batch))


@pytest.mark.parametrize(("excess", "layer", "mlp", "expected"), rows(__file__, "cheapest"))
def test_the_cheapest_recomputation_that_fits_is_chosen(excess, layer, mlp, expected):
    assert memory.cheapest(excess, memory.Part(*layer), memory.Part(*mlp), 4) == tuple(expected)


def test_a_dropped_base_model_leaves_no_tensor(tiny_model):
    base = BaseModel(str(tiny_model))
    gradients(base, adapter := attach(base, 1), collate([segment(1, 3, 5)]))
    left = [StorageWeakRef(one.untyped_storage()) for one in (*base._model.parameters(), adapter.flat)]
    del base, adapter
    gc.collect()
    assert all(storage.expired() for storage in left)


def test_a_micro_batch_keeps_no_more_than_it_may_or_next_to_nothing(tiny_model):
    plain = BaseModel(str(tiny_model))
    adapter = attach(plain, 1)
    small, big = collate([segment(1, 3, 40)]), collate([segment(1, 3, 40), segment(2, 3, 40), segment(3, 3, 40)])
    limit = int(1.5 * small.num_padded_tokens * plain.activation_bytes_per_token)
    bounded = BaseModel(str(tiny_model), activation_bytes=limit)
    within = attach(bounded, 1)
    sizes = [size(kept(bounded, within, batch)) for batch in (small, big)]
    bounded.limit_activations(0)
    free, least = size(kept(plain, adapter, big)), size(kept(bounded, within, big))
    assert least < 0.3 * free
    assert least < sizes[1] < limit < free, "no more layers are recomputed than must be"
    assert sizes[0] < limit
