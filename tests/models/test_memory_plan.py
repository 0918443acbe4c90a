"""The plan against peaks measured on a card, and what is refused."""

import pytest
from tests.models.model_folders import write_model
from tests.tables import data, rows

from marlaas.models import inspect, memory_plan
from marlaas_api.documents import job_spec
from marlaas_api.kinds import ModelPoolSpec, RLJobSpec

GIB = 2**30
JOB = {"poolRef": {"name": "p"}, "environment": {"name": "reverse"}, "agents": [{"name": "a", "adapter": {"rank": 16}}]}


def llama(folder, name):
    vocabulary, hidden, inner, layers, heads, kv_heads = data(__file__, "llamas")[name]
    kv = hidden // heads * kv_heads
    widths = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
    widths |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    shapes = {f"model.layers.{at}.{part}_proj.weight": one for at in range(layers) for part, one in widths.items()}
    ends = {"model.embed_tokens.weight": (vocabulary, hidden)}
    ends |= {} if name == "smollm2" else {"lm_head.weight": (vocabulary, hidden)}
    config = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    config |= {"num_key_value_heads": kv_heads, "max_position_embeddings": 65536}
    return inspect(write_model(folder / "m", shapes | ends, **config))


def pool(rollout=(), trainer=()):
    return ModelPoolSpec.model_validate({"model": {"path": "m"}, "rollout": dict(rollout), "trainer": dict(trainer)})


@pytest.mark.parametrize(("name", "tokens", "bytes_allowed", "gib"), rows(__file__, "peaks"))
def test_a_trainers_plan_is_within_a_tenth_of_the_measured_peak(tmp_path, name, tokens, bytes_allowed, gib):
    job = job_spec(RLJobSpec.model_validate(JOB | {"training": {"steps": 1, "microbatchTokens": tokens}}))
    spec = pool(trainer={"activationBytes": bytes_allowed})
    plan, _ = memory_plan.trainer_plan(llama(tmp_path, name), spec, [job])
    assert (plan.total - plan.context) / GIB == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize(("name", "mib"), [("8b", 5.66), ("smollm2", 0.65)])
def test_a_tokens_activations_are_those_measured(tmp_path, name, mib):
    assert memory_plan.kept_bytes(llama(tmp_path, name), 2, 16) / 2**20 == pytest.approx(mib, rel=0.02)
