"""The estimate against numbers worked out by hand, and limits read from files as the kernel writes them."""

import pytest
from tests.models.model_folders import write_model
from tests.tables import data, rows

from marlaas.models import ModelFacts, inspect, memory, memory_plan
from marlaas_api.documents import job_spec
from marlaas_api.kinds import ModelPoolSpec, RLJobSpec

KIB = 1024
GIB = 2**30
LARGE = {"model.embed_tokens.weight": (2**20, 2**10), "model.layers.0.mlp.up_proj.weight": (2**16, 2**15)}
LIMITS = rows(__file__, "limits")


def pool(**spec):
    return ModelPoolSpec.model_validate({"model": {"path": "m"}, "adapterSlots": 3, "maxRank": 8} | spec)


def job(tokens, *adapters, **settings):
    made = [{"rank": rank, "alpha": 2 * rank, "targets": targets} for rank, targets in adapters]
    agents = [{"name": f"a{number}", "adapter": adapter} for number, adapter in enumerate(made)]
    training = {"steps": 1, "microbatchTokens": tokens} | settings
    spec = {"poolRef": {"name": "p"}, "environment": {"name": "reverse"}, "agents": agents, "training": training}
    return job_spec(RLJobSpec.model_validate(spec))


def small(folder):
    """Layers of 8 to 8 and 32 to 8, twice; embeddings of 100 tokens."""
    return inspect(write_model(folder / "m", vocab_size=100, hidden_size=8, num_hidden_layers=2))


def test_weights_cache_and_adapters_of_both_roles(tmp_path):
    facts = inspect(write_model(tmp_path / "m", LARGE))
    engine, trainer = memory.demands(facts, pool(rollout={"dtype": "bfloat16", "kvCacheBytes": "1Gi", "replicas": 2}))
    adapter = 8 * (2**16 + 2**15)
    assert list(engine.parts.values()) == [3 * GIB * 2, GIB, 3 * 4 * adapter * 2, memory.ENGINE_PROCESS_BYTES]
    assert engine.total == 2 * sum(engine.parts.values())
    activations = int(1.35 * (4096 * 2 * (2**16 + 2**15 + 8)))
    assert list(trainer.parts.values()) == [3 * GIB * 2, 4 * 12 * adapter, activations, memory.TRAINER_PROCESS_BYTES]
    engine, _ = memory.demands(facts, pool(rollout={"engine": "reference"}))
    assert list(engine.parts) == ["weights as 32-bit numbers", "adapters", "process"], "it has no KV cache"


def test_a_trainer_holds_every_agents_optimizer_and_the_widest_micro_batch_of_all_jobs(tmp_path):
    facts = small(tmp_path)
    jobs = [job(256, (8, ["q_proj"]), (1, [])), job(512, (8, ["down_proj"]))]
    sizes = [2 * 8 * (8 + 8), 2 * 1 * (16 + 40), 2 * 8 * (8 + 32)]
    assert sizes == [256, 112, 640]
    linear = 2 * (8 + 8 + 8) + 2 * (32 + 8 + 8)
    for dtype, number, norms, head, heap in (("float32", 4, 0, 0, 1.17), ("bfloat16", 2, 64, 4 * 100 * 8, 1.35)):
        _, trainer = memory.demands(facts, pool(rollout={"dtype": dtype}), jobs)
        activations = int(heap * 512 * (number * linear + norms)) + 3 * (512 * 4 * 100) + head
        agents = 4 * (4 * (256 + 112 + 640) + 8 * 640)
        expected = [facts.num_parameters * number, agents, activations, memory.TRAINER_PROCESS_BYTES]
        assert list(trainer.parts.values()) == expected
    _, two = memory.demands(facts, pool(trainer={"replicas": 2}), jobs)
    assert two.parts["adapters and optimizer"] == 4 * (4 * 504 + 8 * 640)


def test_a_kl_reference_that_is_no_base_model_is_a_copy_more(tmp_path):
    facts = small(tmp_path)
    behind = {"kl": {"coefficient": 0.1, "reference": {"versionsBehind": 2}}}
    sizes = [memory.demands(facts, pool(), [job(256, (8, ["q_proj"]), **kl)])[1].parts for kl in ({}, behind)]
    assert [one["adapters and optimizer"] for one in sizes] == [4 * (4 + 8) * 256, 4 * (5 + 8) * 256]


@pytest.mark.parametrize("replicas", [1, 2])
def test_trainers_share_what_all_workers_leave_of_the_machines_memory(tmp_path, replicas):
    facts = small(tmp_path)
    one, two = pool(trainer={"replicas": replicas}), pool()
    needed = [*memory.demands(facts, one), *memory.demands(facts, two)]
    agents = sum(each.workers * each.parts.get("adapters and optimizer", 0) for each in needed)
    free = sum(each.total for each in needed) - agents + 3 * GIB
    rooms = memory.agent_rooms([memory.PoolUse(facts, one), memory.PoolUse(facts, two)], free)
    assert rooms == [int(memory.USABLE * 3 * GIB / (replicas + 1))] * 2


@pytest.mark.parametrize("free", [0, 10 * GIB])
def test_a_trainer_has_room_for_every_single_job_however_little_is_free_now(tmp_path, free):
    facts = small(tmp_path)
    jobs = [job(256, (8, ["q_proj"]), (8, ["q_proj"])), job(256, (8, ["q_proj"]))]
    least = memory.agent_rooms([memory.PoolUse(facts, pool(), jobs), memory.PoolUse(facts, pool())], 0)
    assert least == [4 * 4 * 2 * 256, 4 * 4 * facts.adapter_parameters(8)]
    rooms = memory.agent_rooms([memory.PoolUse(facts, pool(), jobs), memory.PoolUse(facts, pool())], free)
    assert (rooms == least) is (free == 0)


def test_activations_that_would_be_recomputed_take_what_the_pool_allows_or_what_is_kept_then(tmp_path):
    facts = small(tmp_path)
    kept = 4 * 1000 * (2 * (8 + 8 + 8) + 2 * (32 + 8 + 8))
    assert kept == 576_000
    for most, expected in (("600k", 576_000), ("500k", 500_000), ("1k", 4 * 1000 * 8 * 2 + 288_000)):
        assert memory.activation_bytes(facts, pool(trainer={"activationBytes": most}), 8, 1000) == expected


def test_a_model_that_does_not_fit_is_told_in_one_sentence_with_the_numbers(tmp_path):
    needed = memory.demands(inspect(write_model(tmp_path / "m", LARGE)), pool())
    assert "".join(memory.shortage(needed, 16 * GIB)) == data(__file__, "shortage")
    assert memory.shortage(needed, 30 * GIB) is None


@pytest.mark.parametrize(("group", "files", "limit", "free"), LIMITS)
def test_memory_is_the_machines_or_the_tightest_groups(tmp_path, group, files, limit, free):
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:  4000 kB\nMemFree: 1000 kB\nMemAvailable:  3000 kB\nHugePages_Total: 0\n")
    (proc / "self" / "cgroup").write_text(group)
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    assert memory.machine(proc, cgroups) == memory.Machine(limit * KIB, free * KIB)
    assert memory.machine(tmp_path / "none") is None, "the kernel tells nothing"


def test_an_accelerator_is_seen_by_its_device(tmp_path):
    assert not memory.has_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert memory.has_gpu(tmp_path)


def llama(name):
    vocabulary, hidden, inner, layers, kv = data(__file__, "llamas")[name]
    shapes = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
    shapes |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    size = layers * sum(out * into for out, into in shapes.values()) + vocabulary * hidden * (
        1 if name == "smollm2" else 2
    )
    linear = {f"{part}_proj": (shape,) * layers for part, shape in shapes.items()}
    return ModelFacts(("LlamaForCausalLM",), size, linear, None, vocabulary, hidden, layers)


@pytest.mark.parametrize(("name", "tokens", "allowed", "peak", "token_mib"), rows(__file__, "peaks"))
def test_a_trainers_plan_is_within_a_tenth_of_peaks_measured_on_a_card(name, tokens, allowed, peak, token_mib):
    spec = pool(trainer={"activationBytes": allowed}, maxRank=16)
    plan, sizes = memory_plan.trainer_plan(llama(name), spec, [job(tokens, (16, []))])
    assert (plan.total - plan.context) / GIB == pytest.approx(peak, rel=0.1)
    assert token_mib is None or sizes.kept / 2**20 == pytest.approx(token_mib, rel=0.02)
    for limit, kept in (
        (sizes.recomputed, sizes.recomputed),
        (sizes.kept / 2, sizes.kept / 2),
        (sizes.kept * 2, sizes.kept),
    ):
        spec = pool(trainer={"activationBytes": str(int(tokens * limit))}, maxRank=16)
        plan, given = memory_plan.trainer_plan(llama(name), spec, [job(tokens, (16, []))], spare=1000)
        assert given.left == plan.activations + 1000
        assert plan.activations == pytest.approx(tokens * kept), (
            "only as many layers are recomputed as the limit demands"
        )
