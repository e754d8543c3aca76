"""What of a request would end vLLM's engine core, and with it the engine: refused before vLLM sees it."""

from collections.abc import Mapping, Sequence
from typing import Any

from dcr.protocol.errors import RefusedError


class PromptCheck:
    """Checks token ids, which vLLM itself does not where it was started without a tokenizer.

    An id that the model does not have is an index out of bounds in the worker: the engine core ends, for everybody.

    Args:
        name: names the engine in errors.
        config: its ``VllmConfig``.
    """

    def __init__(self, name: str, config: Any) -> None:
        self._name = name
        self._size = int(config.model_config.get_vocab_size())
        self._unchecked = bool(config.model_config.skip_tokenizer_init)

    def check_ids(self, what: str, ids: Any) -> None:
        """Raise RefusedError unless these are a sequence of ints, each an id of the model.

        With a tokenizer, ids beyond the model's are left to vLLM, which knows the tokenizer's as well.
        """
        if (
            isinstance(ids, (str, bytes, Mapping))
            or not isinstance(ids, Sequence)
            or not all(isinstance(token, int) for token in ids)
        ):
            raise RefusedError(
                f"engine {self._name}: {what} is {type(ids).__name__}, not a sequence of token ids: tokenize it first"
            )
        if self._unchecked and ids and not (min(ids) >= 0 and max(ids) < self._size):
            wrong = next(token for token in ids if not 0 <= token < self._size)
            raise RefusedError(
                f"engine {self._name}: {what} holds token id {wrong}, and the model has 0 to {self._size - 1}: is it "
                "tokenized for another model?"
            )

    def check(self, prompt: Any) -> None:
        """The same for a prompt as ``AsyncLLM.generate`` takes it; one without token ids is vLLM's to judge."""
        if isinstance(prompt, Mapping):
            prompt = prompt.get("prompt_token_ids")
        if self._unchecked and isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes)):
            self.check_ids("the prompt", prompt)
