"""A judge behind an address: any server that speaks OpenAI's chat completions.

The openai package sends, waits and tries again (429, 5xx, timeouts, broken connections; Retry-After is kept). Here is
how many requests fly at once, how often one starts, and what a reply or an error means.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any

from plaudit.config import JudgeConfig
from plaudit.errors import ConfigError, EndpointError, first_line
from plaudit.evaluation.language_judge import Ask, Letter, Refusal, Reply, Said

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAIError

#: seconds between two looks at whether somebody wants to stop, and how long what is under way may then take
POLL, GRACE = 0.2, 10.0
#: statuses that speak of one question: it is too long, or the server's filter does not like it
OF_THE_QUESTION = (400, 413, 422)
#: so many refusals before any reply are no matter of single questions
GIVE_UP = 3

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_LETTER = re.compile(
    r"""[\W_]*(?:(?:the\ )?(?:better\ )?(?:answer|response|option|choice)(?:\ is)?[\W_]+)?   # Answer:
        ([AB])                                                              # the letter, and no word that begins so
        (?:[\W_]*$|[*_`"]*\n|[*_`"]*[.:;)\]]|[*_`"]*\ is\ better)""",
    re.VERBOSE | re.IGNORECASE,
)


def letter_of(said: str) -> Letter:
    """The letter that a reply begins with; empty where there is none, or where it may be a word."""
    found = _LETTER.match(_THOUGHT.sub("", said).strip())
    if found is None:
        return ""
    return "A" if found[1].upper() == "A" else "B"


class Endpoint:
    """Asks a model at an address. ``heard``: it has answered something before."""

    def __init__(self, config: JudgeConfig, *, heard: bool = False):
        """
        Raises:
            ConfigError: the package that speaks to servers is not installed, or the key's variable holds none.
        """
        try:
            import openai
        except ImportError:
            raise ConfigError('judge.endpoint: needs the package openai; run `pip install "plaudit[judge]"`') from None
        self._openai, self._config, self._heard = openai, config, heard
        self._key = _key(config.api_key_env)
        self._gap = 60 / config.requests_per_minute if config.requests_per_minute else 0.0
        self._free = 0.0

    def replies(self, asks: Iterable[Ask], stopped: Callable[[], bool]) -> Iterator[Said]:
        """
        Raises:
            EndpointError: the server cannot be reached, refuses, or what it says is no chat completion. What was
                answered until then has been yielded.
        """
        from anyio.from_thread import start_blocking_portal

        # an event loop of its own thread: a notebook has one already, and Ctrl-C comes to the thread that waits
        with start_blocking_portal() as portal:
            client = portal.call(self._open)
            flying: dict[Future[Reply | Refusal], Ask] = {}
            try:
                yield from self._flights(
                    asks, stopped, flying, lambda ask: portal.start_task_soon(self._ask, client, ask)
                )
            finally:
                for future in flying:
                    future.cancel()
                portal.call(client.close)

    def _flights(
        self,
        asks: Iterable[Ask],
        stopped: Callable[[], bool],
        flying: dict[Future[Reply | Refusal], Ask],
        send: Callable[[Ask], Future[Reply | Refusal]],
    ) -> Iterator[Said]:
        waiting = iter(asks)
        failure: EndpointError | None = None
        refused, last = 0, float("inf")
        while True:
            if failure or stopped():
                last = min(last, time.monotonic() + GRACE)
            else:
                while len(flying) < self._config.concurrency and (ask := next(waiting, None)):
                    flying[send(ask)] = ask
            if not flying or time.monotonic() > last:
                break
            done, _ = wait(flying, timeout=POLL, return_when=FIRST_COMPLETED)
            said: Said = []
            for future in done:
                ask = flying.pop(future)
                try:
                    said.append((ask, future.result()))
                except EndpointError as error:
                    failure = failure or error
            for _, reply in said:
                if isinstance(reply, Reply):
                    self._heard = True
                elif not self._heard:
                    refused += 1
                    failure = failure or (EndpointError(reply.reason) if refused >= GIVE_UP else None)
            if said:
                yield said
        if failure:
            raise failure

    async def _open(self) -> AsyncOpenAI:
        config = self._config
        return self._openai.AsyncOpenAI(
            base_url=config.endpoint,
            # without one the package would look for a key elsewhere
            api_key=self._key or "none",
            timeout=config.timeout,
            max_retries=config.retries,
            http_client=self._openai.DefaultAsyncHttpxClient(event_hooks={"request": [self._before]}),
        )

    async def _before(self, request: Any) -> None:
        """Called before every request, those that are tried again included: waits for its turn."""
        import anyio

        if not self._key:
            request.headers.pop("Authorization", None)
        now = time.monotonic()
        start = max(now, self._free)
        self._free = start + self._gap
        if start > now:
            await anyio.sleep(start - now)

    async def _ask(self, client: AsyncOpenAI, ask: Ask) -> Reply | Refusal:
        openai = self._openai
        try:
            answered = await client.chat.completions.with_raw_response.create(
                model=self._config.model,
                messages=[{"role": "user", "content": ask.text}],
                temperature=0,
                max_tokens=self._config.max_tokens,
            )
        except openai.OpenAIError as error:
            status = getattr(error, "status_code", None)
            if status in OF_THE_QUESTION:
                words = self._at(f"refused ({status}: {self._words(error)})")
                return Refusal(f"comparison {ask.comparison}: {words}")
            raise EndpointError(self._at(self._trouble(error))) from None
        try:
            said = answered.parse().choices[0].message.content or ""
        except (ValueError, AttributeError, TypeError, IndexError):
            start = self._hidden(" ".join(answered.text.split())[:80])
            raise EndpointError(
                self._at(f"what came is no chat completion: {start!r}; check judge.endpoint, which often ends in /v1")
            ) from None
        said = self._hidden(said)
        return Reply(letter_of(said), said, answered.elapsed.total_seconds())

    def _at(self, text: str) -> str:
        return f"{self._config.endpoint}: {text}"

    def _trouble(self, error: OpenAIError) -> str:
        """What an error means for who runs this, and what to do."""
        openai, config = self._openai, self._config
        variable = config.api_key_env or "a variable that judge.api_key_env names"
        match error:
            case openai.AuthenticationError() | openai.PermissionDeniedError():
                if self._key:
                    return f"refuses the key in {variable} ({error.status_code}); check the key and what it may use"
                return f"wants a key ({error.status_code}); put it into {variable}"
            case openai.NotFoundError():
                return (
                    f"nothing there for the model {config.model!r} (404: {self._words(error)}); check judge.model, and "
                    "judge.endpoint, which often ends in /v1"
                )
            case openai.RateLimitError():
                return (
                    f"too many requests (429: {self._words(error)}); lower judge.requests_per_minute or "
                    "judge.concurrency, or go on later"
                )
            case openai.APIStatusError():
                return f"fails ({error.status_code}: {self._words(error)}); see the server's log, and go on later"
            case openai.APITimeoutError():
                return (
                    f"no answer within {config.timeout:g} s, {config.retries + 1} times; raise judge.timeout, or lower "
                    "judge.concurrency"
                )
            case openai.APIConnectionError():
                cause = self._hidden(first_line(error.__cause__ or error))
                return f"cannot be reached ({cause}); check judge.endpoint, and whether the server runs"
        return self._words(error)

    def _words(self, error: OpenAIError) -> str:
        """The server's own words, in one line."""
        body = getattr(error, "body", None)
        said = body.get("message") if isinstance(body, dict) else None
        return self._hidden(" ".join(str(said or first_line(error)).split())[:200])

    def _hidden(self, text: str) -> str:
        """Without the key, which a server may repeat."""
        return text.replace(self._key, "…") if self._key else text


def _key(variable: str) -> str:
    """The key in an environment variable; empty where none is to be sent.

    Raises:
        ConfigError: a variable that was named is not set, or holds what no request can carry.
    """
    key = os.environ.get(variable, "").strip() if variable else ""
    if not key and variable not in ("", JudgeConfig().api_key_env):
        raise ConfigError(f"judge.api_key_env: the environment variable {variable} is not set")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{variable}: holds characters that no key has; set it again")
    return key
