"""The child's end of its connection: several threads wait for turns, and one of them reads for all."""

import socket
import sys
import threading

from marlaas.environment_types import TurnRequest
from marlaas_worker.sandbox.channel import SupervisorChannel, encode_frame, receive_frame

ROUNDS = 200


def answer(agent: str, number: int) -> bytes:
    return encode_frame(
        {"kind": "reply", "agent": agent, "turn": number, "text": f"{agent}{number}", "stop_reason": "stop"}
        | {"num_tokens": 1, "num_prompt_tokens": 1}
    )


def test_an_answer_reaches_its_thread_while_another_ones_is_awaited():
    """Thread a waits for its only turn until b has had all of its turns, one after another: whoever reads must let b go on."""
    ours, theirs = socket.socketpair()
    channel = SupervisorChannel(ours)
    texts: list[str] = []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def speak(agent: str, turns: int) -> None:
        for number in range(turns):
            texts.append(channel.turn(TurnRequest(agent, None, "x", number=number)).text)

    threads = [threading.Thread(target=speak, args=arguments, daemon=True) for arguments in (("a", 1), ("b", ROUNDS))]
    try:
        for thread in threads:
            thread.start()
        theirs.settimeout(20)
        asked = 0
        while asked < ROUNDS:
            request = receive_frame(theirs)
            if request["agent"] == "b":
                asked += 1
                theirs.sendall(answer("b", request["number"]))
        theirs.sendall(answer("a", 0))
        for thread in threads:
            thread.join(20)
    finally:
        sys.setswitchinterval(before)
        theirs.close()
        ours.close()
    assert sorted(texts) == sorted(["a0", *(f"b{number}" for number in range(ROUNDS))])


def test_all_waiting_threads_learn_that_the_connection_is_closed():
    ours, theirs = socket.socketpair()
    channel = SupervisorChannel(ours)
    errors: list[EOFError] = []

    def speak(agent: str) -> None:
        try:
            channel.turn(TurnRequest(agent, None, "x"))
        except EOFError as error:
            errors.append(error)

    threads = [threading.Thread(target=speak, args=(agent,), daemon=True) for agent in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    theirs.settimeout(20)
    for _ in threads:
        receive_frame(theirs)
    theirs.close()
    for thread in threads:
        thread.join(20)
    ours.close()
    assert len(errors) == 3
