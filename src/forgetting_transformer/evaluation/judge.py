"""Ratings of answers by a language model behind an OpenAI-compatible endpoint. Optional; nothing else needs a network.

Every rating is kept in a JSON-lines file under a hash of what was asked, so that nothing is asked, or paid for, twice.
A request that fails is tried again, longer and longer apart; what still fails is kept too, and asked again next time.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgetting_transformer.evaluation.generation import append_record, read_records
from forgetting_transformer.evaluation.models import EvaluationError

_RATING = re.compile(r"\[\[\s*(\d{1,2})\s*\]\]")
_SECONDS = 60.0  # for one answer

PROMPT = """You grade the answer of a small language model to a question. The model only continues text: whatever \
follows its answer, such as repetitions or unrelated sentences, does not count against it.

Question: {question}
Reference answer: {reference}
The model's answer: {answer}

Compare the model's answer with the reference answer only. Give a whole number from 1 to 10: 10 if it says all that \
the reference says, 1 if it says nothing of it, numbers between for parts of it. Write one sentence of explanation, \
then the rating in double square brackets, such as [[4]]."""


@dataclass(frozen=True)
class Judge:
    """An endpoint that rates.

    Attributes:
        base_url: such as https://api.openai.com/v1 or http://localhost:8000/v1; `/chat/completions` is added.
        model: as the endpoint calls it.
        cache: JSON-lines file of ratings and failures.
        api_key: sent as a bearer token if there is one.
        tries: requests for one rating.
        wait: called with the seconds to wait between them.
    """

    base_url: str
    model: str
    cache: Path
    api_key: str | None = None
    tries: int = 5
    wait: Callable[[float], None] = time.sleep

    def rate(self, question: str, reference: str, answer: str) -> int | None:
        """1 to 10, or None where the endpoint gave no rating; the cache says why.

        Raises:
            EvaluationError: the endpoint refuses, or after all tries nothing answers at its address.
        """
        import httpx

        prompt = PROMPT.format(question=question, reference=reference, answer=answer)
        key = hashlib.sha256(f"{self.base_url}\n{self.model}\n{prompt}".encode()).hexdigest()
        known = self._known()
        if known.get(key) is not None:
            return known[key]
        error, unreachable = "", False
        for number in range(self.tries):
            if number:
                self.wait(2.0**number)
            try:
                reply = self._ask(prompt)
                found = _RATING.findall(reply)
                if found and 1 <= int(found[-1]) <= 10:
                    append_record(self.cache, {"key": key, "rating": int(found[-1]), "reply": reply})
                    return int(found[-1])
                error = f"no rating from 1 to 10 in double brackets in the reply {reply[:200]!r}"
            except _Refused:
                raise
            except Exception as failure:  # a network has many ways to fail, and none may cost the other ratings
                error = f"{type(failure).__name__}: {failure}"
                unreachable = isinstance(failure, httpx.ConnectError)
        append_record(self.cache, {"key": key, "rating": None, "error": error, "tries": self.tries})
        if unreachable:
            # It would be the same, after the same waits, for every other answer.
            raise EvaluationError(
                f"{self.base_url} cannot be reached ({error}): check --judge_url. Ratings so far are kept"
            )
        return None

    def _known(self) -> dict[str, int | None]:
        return {record["key"]: record.get("rating") for record in read_records(self.cache) if "key" in record}

    def _ask(self, prompt: str) -> str:
        import httpx

        body: dict[str, Any] = {
            "model": self.model,
            "temperature": 0,
            "messages": [{"role": "user", "content": prompt}],
        }
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        response = httpx.post(url, json=body, headers=headers, timeout=_SECONDS)
        if response.status_code in (401, 403, 404):
            # Asking again would not help, and neither would asking for the other answers.
            raise _Refused(
                f"{url} answers {response.status_code} for the model {self.model!r}: check "
                "--judge_url, --judge_model and the key"
            )
        response.raise_for_status()
        return json.loads(response.text)["choices"][0]["message"]["content"] or ""


class _Refused(EvaluationError):
    pass


def key_from_environment(variable: str) -> str | None:
    """The key in an environment variable: never on a command line, which other users of a machine can read."""
    return os.environ.get(variable) or None
