"""Conversations that go on are kept in memory, and never more of them than there is room for, whatever they are made of."""

from marlaas_api.blobs_memory import MemoryBlobs
from marlaas_api.bus_memory import MemoryServer
from marlaas_api.messages import ChatMessage, GenerateRequest
from marlaas_worker.rollout.conversation import NO_IDS, Conversation
from marlaas_worker.rollout.turn_log import Histories, TurnLog, key_of


def asked(member: int) -> GenerateRequest:
    """The second turn of an episode."""
    names = {"namespace": "team-a", "job": "j", "uid": "u", "agent": "policy", "group": "u-t0"}
    episode = {"member": member, "episode": f"u-t0-{member}-1", "turn": 1, "parent": 0}
    return GenerateRequest.model_validate({**names, **episode, "append": "x", "deadline_s": 1.0})


def test_prompts_that_fit_no_context_are_forgotten_as_well(chatml):
    """They have no ids, and eight million characters each."""
    histories = Histories(chatml, TurnLog(MemoryServer().connect("rollout"), MemoryBlobs()), bytes_kept=10_000)
    text = "x" * 1000
    long = Conversation((ChatMessage(role="user", content=text),), "", text, NO_IDS, None, full=True)
    for member in range(100):
        histories.keep(key_of(asked(member), 0), long)
    kept = [member for member in range(100) if histories.knows_parent(asked(member))]
    assert kept == [97, 98, 99]


def conversation(text: str) -> Conversation:
    return Conversation((ChatMessage(role="user", content=text),), "", text, NO_IDS, None)


def test_a_linear_conversation_needs_one_place(chatml):
    """2,048 open episodes of eight turns each are all found again."""
    histories = Histories(chatml, TurnLog(MemoryServer().connect("rollout"), MemoryBlobs()), bytes_kept=6 << 20)
    for turn in range(8):
        for member in range(2048):
            parent = turn - 1 if turn else None
            request = asked(member).model_copy(update={"turn": turn, "parent": parent})
            assert histories.knows_parent(request)
            histories.keep(key_of(request, turn), conversation("x" * 100 * (turn + 1)), parent)
    assert len(histories) == 2048


def test_the_conversations_of_a_job_that_is_gone_are_dropped(chatml):
    histories = Histories(chatml, TurnLog(MemoryServer().connect("rollout"), MemoryBlobs()), bytes_kept=10_000)
    histories.keep(key_of(asked(0), 0), conversation("x"))
    histories.forget({"another"})
    assert len(histories) == 1
    histories.forget({"u"})
    assert (len(histories), histories._left_bytes) == (0, 10_000)
