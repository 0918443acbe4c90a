"""A judge's reward: another agent of the job, or a service of chat completions, reads the reply and answers with a number.

A judge that fails is never a reward: the episode is a fault of the infrastructure, and is played again.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError

from marlaas.agent_base import AgentBase
from marlaas.environment import Reply, ServiceFailed, TurnLimit
from marlaas.environment_types import UnknownAgent
from marlaas.envs.dataset.judged import Judged
from marlaas.envs.dataset.settings import JudgeSettings
from marlaas.envs.dataset.templates import Template
from marlaas.envs.extraction import extractor
from marlaas.http_post import post_json
from marlaas_api.errors import InvalidInput

_RETRIED = (408, 409, 425, 429)
_SERVER_ERROR = 500
_LONGEST_PAUSE_S = 30.0
_SHOWN = 200

Answer = tuple[str, float]
"""Text of a judge's reply, and the tokens that it has cost; 0: counted elsewhere, or not known."""
Ask = Callable[[str], Answer]


class Judge:
    """The reward part `judge`. place: of the part among the rewards, for errors of its templates."""

    def __init__(self, settings: JudgeSettings, place: int) -> None:
        self.settings = settings
        self.template = Template(settings.prompt, "judge.prompt", "rewards", place, "judge", "prompt")
        self._extract = extractor(settings.extract, settings.pattern)
        # An agent of the job samples its reply, so the same prompt has several answers; a service is asked at temperature 0.
        self._judged = Judged(settings.model_dump()) if settings.agent is None else None

    def score(self, reply: Reply, row: Mapping[str, Any], truth: str, ask: Ask) -> dict[str, float]:
        """Return the metrics `judge`, from 0 to 1, and `judge_tokens`, 0 for a prompt that a service has judged before.

        Raises ServiceFailed: the judge gives no number of its scale.
        """
        prompt = self.template.render({**row, "reply": reply.message, "truth": truth})
        low, high = self.settings.scale
        known = None if self._judged is None else self._judged.find(prompt)
        if known is not None:
            return {"judge": (known - low) / (high - low), "judge_tokens": 0.0}
        cost = 0.0
        for _ in range(self.settings.attempts):
            text, tokens = ask(prompt)
            cost += tokens
            number = _number(self._extract(text))
            if number is not None and low <= number <= high:
                if self._judged is not None:
                    self._judged.add(prompt, number)
                return {"judge": (number - low) / (high - low), "judge_tokens": cost}
        raise ServiceFailed(
            f"the judge gave no number from {low:g} to {high:g} in {self.settings.attempts} replies; the last one is {text!r:.{_SHOWN}}"
        )

    def asks(self, agents: Mapping[str, AgentBase]) -> Ask:
        """Return how this judge is asked in an episode."""
        return self._ask_service if self.settings.agent is None else lambda prompt: self._ask_agent(agents, prompt)

    def _ask_agent(self, agents: Mapping[str, AgentBase], prompt: str) -> Answer:
        agent: Any = agents[str(self.settings.agent)].begin()
        try:
            return agent.say(prompt, max_tokens=self.settings.max_tokens).text, 0.0
        except TurnLimit as limit:
            raise ServiceFailed(f"the judge {agent.name!r} has no turn left: raise rollout.maxTurns") from limit

    def _ask_service(self, prompt: str) -> Answer:
        """Raises ServiceFailed, InvalidInput (the key is missing)."""
        headers, body = self._headers(), self._body(prompt)
        url = f"{str(self.settings.url).rstrip('/')}/chat/completions"
        for attempt in range(self.settings.attempts):
            if attempt:
                time.sleep(min(_LONGEST_PAUSE_S, self.settings.pause_s * 2 ** (attempt - 1)))
            try:
                answer = json.loads(post_json(url, body, self.settings.timeout_s, headers))
                tokens = float((answer.get("usage") or {}).get("total_tokens", 0))
                return str(answer["choices"][0]["message"]["content"]), tokens
            except HTTPError as error:
                problem = f"{error.code} {error.reason}: {error.read(_SHOWN).decode(errors='replace')}"
                if error.code not in _RETRIED and error.code < _SERVER_ERROR:
                    break
            except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise ServiceFailed(f"the judge at {self.settings.url} does not answer: {problem}")

    def _headers(self) -> dict[str, str]:
        if self.settings.key is None:
            return {}
        if not os.environ.get(self.settings.key):
            text = f"the judge's key is missing: the environment has no variable {self.settings.key}"
            raise InvalidInput(f"{text} (docs/reference/environments.md, Variables and keys)")
        return {"Authorization": f"Bearer {os.environ[self.settings.key]}"}

    def _body(self, prompt: str) -> bytes:
        messages = [{"role": "user", "content": prompt}]
        limits = {"temperature": 0, "max_tokens": self.settings.max_tokens}
        return json.dumps({"model": self.settings.model, "messages": messages, **limits}).encode()


def player(agents: Iterable[str], judge: str | None) -> str:
    """Return the name of the agent that plays: the only one that is no judge. Raises UnknownAgent.

    Args:
        judge: agent of the job; None: there is none.
    """
    names = list(agents)
    players = [name for name in names if name != judge]
    if len(players) != 1:
        beside = "" if judge is None else f" beside the judge {judge!r}"
        raise UnknownAgent(f"environment 'dataset' takes one agent{beside}, but the job has {', '.join(names)}")
    return players[0]


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
